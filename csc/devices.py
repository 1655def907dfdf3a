"""Devices: all that csc does in another way on one kind of device than on another. docs/devices.md says how to add one.

Terms: an *accelerator* is a kind of device that torch knows by a type, with a module of torch of the same name; all
other devices are treated as the CPU is. A *wire* is where tensors lie when a process group moves them.

    default(), current(), present(device, where), placed(type, local, neighbours), count(device)       which device
    at(device), stream(), synchronize(device)                                          working on it
    generator(device), set_generator(device, state), forked(device)                    its random numbers
    title(device), memory(device), capability(device), profile(type)                   what it is
    watch_memory(device), peak_memory(device), held_memory(device)                     what was taken of it
    records(device), graphs(device), is_recording(device)                              work that is launched whole
    wire(device, backends), meeting_place(backends), aborts(backend)                   process groups
    TYPES, SWITCHES, LIBRARIES, ASKED                                                  what code may say of devices
"""

from __future__ import annotations

import os
import resource
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from csc.errors import InputError

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of what getrusage says of memory


@dataclass(frozen=True)
class Accelerator:
    """type: as in torch.device(type). name: in sentences. backend: that moves its tensors between processes.

    profile: the hardware profile (csc/analysis/profiles) that plans are made for if the user names none. switches:
    torch's own that decide what it computes, by a name. asked: functions of its module that say something of the world,
    which a cached model may not depend on. libraries: of torch.backends, that take a precision for float32. graph: the
    class of its module that records what is launched; "": none.
    """

    type: str
    name: str
    backend: str
    profile: str
    switches: Mapping[str, Callable[[], Any]]
    asked: frozenset[str]
    libraries: tuple[Any, ...]
    graph: str = ""

    @property
    def module(self) -> Any:
        """torch.TYPE."""
        return torch.get_device_module(self.type)


_backends: Any = torch.backends
_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")

ACCELERATORS = (
    Accelerator(
        type="cuda",
        name="CUDA",
        backend="nccl",
        profile="h100",
        switches={
            "float32 of CUDA": lambda: _backends.cuda.matmul.fp32_precision,
            "float32 of cuDNN": lambda: [_backends.cudnn.conv.fp32_precision, _backends.cudnn.rnn.fp32_precision],
            "TF32": lambda: [_backends.cuda.matmul.allow_tf32, _backends.cudnn.allow_tf32],
            "float16 sums": lambda: _backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            "bfloat16 sums": lambda: _backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "cuDNN": lambda: [_backends.cudnn.enabled, _backends.cudnn.benchmark, _backends.cudnn.deterministic],
        },
        asked=frozenset(
            {"memory_allocated", "memory_reserved", "max_memory_allocated", "mem_get_info", "current_device"}
        ),
        libraries=(_backends.cuda.matmul, _backends.cudnn.conv, _backends.cudnn.rnn),
        graph="CUDAGraph",
    ),
)

TYPES = ("cpu", *(accelerator.type for accelerator in ACCELERATORS))
SWITCHES = {
    "attention": lambda: [getattr(_backends.cuda, name)() for name in _ATTENTION],  # CPUs ask these, too
    **{name: read for accelerator in ACCELERATORS for name, read in accelerator.switches.items()},
}
_ONEDNN = _backends.mkldnn
LIBRARIES = (
    _ONEDNN.matmul,
    _ONEDNN.conv,
    _ONEDNN.rnn,
    *(library for accelerator in ACCELERATORS for library in accelerator.libraries),
)
ASKED = {f"torch.{accelerator.type}": accelerator.asked for accelerator in ACCELERATORS}


@cache
def absent_switches() -> frozenset[str]:
    """Switches of devices that this machine does not have: nothing is computed by them."""
    return frozenset(
        name for accelerator in ACCELERATORS if not accelerator.module.is_available() for name in accelerator.switches
    )


def _accelerator(device: torch.device | str) -> Accelerator | None:
    kind = torch.device(device).type
    return next((accelerator for accelerator in ACCELERATORS if accelerator.type == kind), None)


# which device


def default() -> torch.device:
    """The device to train on where nothing says which."""
    return torch.device(
        next((accelerator.type for accelerator in ACCELERATORS if accelerator.module.is_available()), "cpu")
    )


def current() -> torch.device | None:
    """The accelerator that this thread works on; None if the process has not touched one. Each thread has its own."""
    accelerator = next((accelerator for accelerator in ACCELERATORS if accelerator.module.is_initialized()), None)
    return None if accelerator is None else torch.device(accelerator.type, accelerator.module.current_device())


def present(device: torch.device, where: str) -> torch.device:
    """The device, with its index. InputError if this machine has none of its kind."""
    accelerator = _accelerator(device)
    if accelerator is None:
        return device
    if not accelerator.module.is_available():
        raise _absent(accelerator, where, "run it on a machine with a GPU")
    return device if device.index is not None else torch.device(accelerator.type, accelerator.module.current_device())


def count(device: torch.device) -> int:
    """How many of its kind this machine has; of a device that is no accelerator 1."""
    accelerator = _accelerator(device)
    return 1 if accelerator is None else int(accelerator.module.device_count())


def placed(device: torch.device | str, local: int, neighbours: int) -> tuple[torch.device, str]:
    """The device and the backend of the process with index `local` of `neighbours` on this node, for a program for
    `device`; from now on it works on that device.

    The accelerator's own backend if each has one of its own; else gloo, where processes share what there are.
    InputError if there is none.
    """
    accelerator = _accelerator(device)
    if accelerator is None:
        return torch.device("cpu"), "gloo"
    count = accelerator.module.device_count()
    if count == 0:
        raise _absent(accelerator, "setup_distributed", "run it on machines with GPUs")
    place = torch.device(accelerator.type, local % count)
    accelerator.module.set_device(place)
    return place, accelerator.backend if count >= neighbours and dist.is_backend_available(
        accelerator.backend
    ) else "gloo"


def _absent(accelerator: Accelerator, where: str, instead: str) -> InputError:
    fault = f"the program is for {accelerator.name}, and there is no {accelerator.name} device here"
    return InputError(fault, where, f"Compile it with device='cpu', or {instead}")


# working on it


def at(device: torch.device) -> AbstractContextManager[Any]:
    """What is computed inside runs on this device."""
    accelerator = _accelerator(device)
    return nullcontext() if accelerator is None else accelerator.module.device(device)


def stream() -> AbstractContextManager[Any]:
    """Another thread that enters it works on the device and the stream that this one works on."""
    accelerator = next((accelerator for accelerator in ACCELERATORS if accelerator.module.is_initialized()), None)
    return nullcontext() if accelerator is None else accelerator.module.stream(accelerator.module.current_stream())


def synchronize(device: torch.device) -> None:
    """Wait until all that was started there is done."""
    accelerator = _accelerator(device)
    if accelerator is not None:
        accelerator.module.synchronize(device)


# its random numbers


def generator(device: torch.device) -> torch.Tensor:
    """The state of the device's generator: uint8 on the CPU."""
    accelerator = _accelerator(device)
    return torch.get_rng_state() if accelerator is None else accelerator.module.get_rng_state(device)


def set_generator(device: torch.device, state: torch.Tensor) -> None:
    """Set what `generator` gave."""
    accelerator = _accelerator(device)
    if accelerator is None:
        torch.set_rng_state(state)
    else:
        accelerator.module.set_rng_state(state.cpu(), device)


def seed(device: torch.device, number: int) -> None:
    """Let the generators of the CPU and of the device begin anew."""
    torch.default_generator.manual_seed(number)  # that of `torch` writes down who has asked, for other devices
    accelerator = _accelerator(device)
    if accelerator is not None:
        with at(device):
            accelerator.module.manual_seed(number)


def forked(device: torch.device) -> AbstractContextManager[None]:
    """The generators of the CPU and of the device are as they were afterwards."""
    accelerator = _accelerator(device)
    return (
        torch.random.fork_rng([])
        if accelerator is None
        else torch.random.fork_rng([device], device_type=accelerator.type)
    )


# what it is


def title(device: torch.device) -> str:
    """What the maker calls it; of a device that is no accelerator its type."""
    accelerator = _accelerator(device)
    return device.type if accelerator is None else str(accelerator.module.get_device_name(device))


def uuid(device: torch.device) -> str | None:
    """What NVML calls it, whatever number it has in this process; None: NVML does not know such devices."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def memory(device: torch.device) -> int:
    """Bytes in all; of a device that is no accelerator those of the machine."""
    accelerator = _accelerator(device)
    if accelerator is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(accelerator.module.get_device_properties(device).total_memory)


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors took since `watch_memory`; of a device that is no accelerator the most that this
    process ever took.
    """
    accelerator = _accelerator(device)
    if accelerator is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    statistics = accelerator.module.memory_stats_as_nested_dict(
        device
    )  # max_memory_allocated sorts all that is counted
    return int(statistics["allocated_bytes"]["all"]["peak"]) if statistics else 0


def held_memory(device: torch.device) -> int:
    """Bytes that tensors take now; of a device that is no accelerator nothing is known: 0."""
    accelerator = _accelerator(device)
    return 0 if accelerator is None else int(accelerator.module.memory_allocated(device))


def watch_memory(device: torch.device) -> None:
    """`peak_memory` starts anew."""
    accelerator = _accelerator(device)
    if accelerator is not None:
        accelerator.module.reset_peak_memory_stats(device)


def capability(device: torch.device) -> tuple[int, int] | None:
    """The version of an accelerator's instructions, (major, minor); None of others."""
    accelerator = _accelerator(device)
    return None if accelerator is None else accelerator.module.get_device_capability(device)


def profile(device: str) -> str:
    """The hardware profile that a program for the device is planned for by default."""
    accelerator = _accelerator(device)
    return "cpu" if accelerator is None else accelerator.profile


# its graphs


class DeviceGraphs:
    """Records what code launches on a device, to launch it again at once, on the same addresses: torch.cuda.CUDAGraph.

    A *pool* is memory that recordings take for themselves. Those that share one may write over what the others made and
    nobody held when they were recorded. Other threads may go on using the device while one records (NCCL's asks for the
    ends of what it started).
    """

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self._of, self._device = accelerator, device
        self._graph = getattr(self._of.module, accelerator.graph)
        self._beside = self._of.module.Stream(device)

    def pool(self) -> Any:
        """A new one. Torch takes nothing more into a pool whose recordings are all gone: an empty one stays."""
        handle = self._of.module.graph_pool_handle()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is empty
            stays, _ = self._recorded(lambda: None, handle)
        return handle, stays

    def warm(self, run: Callable[[], None]) -> None:
        """Run it on the stream that `record` uses: what kernels and libraries make for themselves at a first call is no
        part of a recording.
        """
        stream = self._of.module.current_stream(self._device)
        self._beside.wait_stream(stream)
        try:
            with self._of.module.stream(self._beside):
                run()
        finally:
            stream.wait_stream(self._beside)

    def record(self, run: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        """What launches it again, on the stream that is current then; and what it returned, whose values come with the
        first launch. RuntimeError for what cannot be recorded; nothing has run then. pool: of `pool`.

        torch.cuda.graph would wait for the whole device first. A receive may be under way there, for what another rank
        sends once it has what is computed here.
        """
        graph, results = self._recorded(run, pool[0])
        return graph.replay, results

    def _recorded(self, run: Callable[[], Any], handle: Any) -> tuple[Any, Any]:
        graph = self._graph()
        with self._of.module.stream(self._beside):
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            try:
                results = run()
            except BaseException:
                with suppress(RuntimeError):  # that the capture is no longer good
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, results

    def finish(self) -> None:
        """Wait for what was launched on the current stream, and for nothing else."""
        self._of.module.current_stream(self._device).synchronize()


def records(device: torch.device | str) -> bool:
    """Whether a device of this type has graphs."""
    accelerator = _accelerator(device)
    return accelerator is not None and accelerator.graph != ""


def is_recording(device: torch.device) -> bool:
    """Whether what is launched on it now is recorded, so that the host cannot ask for values."""
    accelerator = _accelerator(device)
    return accelerator is not None and bool(accelerator.module.is_current_stream_capturing())


def graphs(device: torch.device) -> DeviceGraphs | None:
    """None of a device that has none."""
    accelerator = _accelerator(device)
    return DeviceGraphs(accelerator, device) if accelerator is not None and records(device) else None


# process groups


def wire(device: torch.device, backends: str) -> torch.device:
    """Where tensors of a device lie when groups with these backends (as torch lists them) move them."""
    accelerator = _accelerator(device)
    return device if accelerator is not None and accelerator.backend in backends else torch.device("cpu")


def meeting_place(backends: str) -> torch.device:
    """Where a tensor has to lie for groups with these backends to move it: the CPU if one of them can."""
    accelerator = next(
        (accelerator for accelerator in ACCELERATORS if accelerator.backend in backends and "gloo" not in backends),
        None,
    )
    return (
        torch.device("cpu")
        if accelerator is None
        else torch.device(accelerator.type, accelerator.module.current_device())
    )


def aborts(backend: str) -> bool:
    """Whether a group of this backend has to be aborted, as what it has started on the device would be waited for."""
    return backend in {accelerator.backend for accelerator in ACCELERATORS}
