"""The state of a training run: what of it goes to a checkpoint, and how it is taken up again."""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import csc
from csc import devices
from csc.capture.quantised_weights import refuse_on_disk
from csc.checkpoints import restoring, writing
from csc.checkpoints.files import FILE, OLDER, StepIndex, packed, unpacked
from csc.checkpoints.restoring import Expected
from csc.checkpoints.writing import ProcessState
from csc.driver.batches import place
from csc.driver.checkpoint import format_of, on_meta, put_rest, read_rest, write_config
from csc.driver.programs import ProgramSet
from csc.errors import CscError, InputError
from csc.ir.mesh import Mesh
from csc.runtime import optimizer
from csc.runtime.meeting import NOTHING, Meeting, Vote, first_line
from csc.runtime.specs import whole_box
from csc.runtime.trainer import Trainer
from csc.runtime.weights import WeightLayout, check_rest, published

# --- The position of a data loader, kept with a checkpoint: each share of the samples has its own --------------------
#
# Terms: a loader *says its position* with state_dict() and goes there with load_state_dict(state), as torchdata's
# StatefulDataLoader does. The file of share d of n is loader_D_of_N.pt; it is read without unpickling objects.


ANY_SHARE = "position_of_all_shares"  # of a loader whose position is the same for whatever dp
_FILE = re.compile(r"loader_(\d+)_of_(\d+)\.pt")


@dataclass(frozen=True)
class Prefetched:
    """A loader of which more was fetched than was trained on: it says the position of what was."""

    loader: Any
    position: Any

    def state_dict(self) -> Any:
        return self.position

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    @property
    def position_of_all_shares(self) -> bool:
        return bool(getattr(self.loader, ANY_SHARE, False))


def check(loader: Any) -> None:
    """InputError for a loader that cannot say where it is."""
    if not all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        raise InputError(
            f"a {type(loader).__name__} cannot say at which sample it is", "loader",
            "use torchdata.stateful_dataloader.StatefulDataLoader in its place, or anything with state_dict() and "
            "load_state_dict()",
        )  # fmt: skip


def write(loader: Any, directory: str | Path, place: tuple[int, int]) -> None:
    """The file appears whole or not at all."""
    state = loader.state_dict()
    published(_file(directory, place), lambda path: torch.save(state, path))


def read(directory: str | Path, place: tuple[int, int]) -> Any:
    """The state. InputError if there is no position for this share."""
    file = _file(directory, place)
    if not file.is_file():
        files = sorted(path.name for path in Path(directory).glob("loader_*.pt") if _FILE.fullmatch(path.name))
        fault = f"the positions there are {', '.join(files)}" if files else "no position of a loader was saved there"
        raise InputError(
            f"{fault}, and this process loads share {place[0]} of {place[1]}", str(directory),
            "resume with the dp that it was saved with, or load without loader= and start at the data's beginning",
        )  # fmt: skip
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged file torch says all kinds of things
        raise InputError(
            f"it holds no position of a loader: {first_line(error)}", str(file), "resume from another checkpoint"
        ) from error


def _file(directory: str | Path, place: tuple[int, int]) -> Path:
    return Path(directory) / f"loader_{place[0]}_of_{place[1]}.pt"


# --- A compiled model on disk: weights, the optimizer's state, a loader's position, the configuration, adapters ------
#
# Every rank calls these functions, for the same directory; each reads and writes what its ranks hold.


@dataclass(frozen=True)
class Saved:
    """form: how the files name the model's tensors. loader, optimizer: None: not saved, or left as it is."""

    model: nn.Module
    trainer: Trainer
    form: WeightLayout
    mesh: Mesh
    loader: Any
    optimizer: torch.optim.Optimizer | None
    look: Callable[[], None]  # to call once the model has other values

    @classmethod
    def of(
        cls,
        model: nn.Module,
        trainer: Trainer,
        programs: ProgramSet,
        mesh: Mesh,
        loader: Any,
        optimizer: torch.optim.Optimizer | None,
    ) -> Saved:
        """programs: the trainer's; of the others the parameters are trained, too."""
        trainers = [trainer]
        if dist.is_initialized() and dist.get_world_size() > 1:
            trainers += programs.trainers  # what those use is trained on another rank, not in this copy
        form = format_of(model, {spec.name for trainer in trainers for spec in trainer.program.manifest.parameters})
        return cls(model, trainer, form, mesh, loader, optimizer, programs.look)


def load(path: str | Path, saved: Saved) -> None:
    """Read it all, or raise InputError; the optimizer's state is read behind the weights that it belongs to."""
    refuse_on_disk(saved.model, "load")
    positions: list[Any] = []
    meeting = saved.trainer.transport.meeting

    def rest() -> tuple[Vote, dict[str, torch.Tensor]]:
        if saved.loader is not None:
            check(saved.loader)
            positions.append(read(path, place(saved.mesh)))
        keeps = 0 in saved.trainer.transport.ranks or not on_meta(saved.form)
        return NOTHING, read_rest(path, saved.form) if keeps else {}

    rest_found = meeting.hold("load", rest)
    saved.trainer.load(path, saved.form)
    put_rest(saved.model, saved.form, rest_found)
    if saved.optimizer is not None:
        optimizer.load(path, saved.optimizer, saved.trainer)
    for position in positions:
        saved.loader.load_state_dict(position)
    saved.look()  # what the step does not use may have got values for the first time


def save(directory: str | Path, saved: Saved) -> None:
    """Write it all. InputError, on every rank, if one cannot."""

    def config() -> tuple[Vote, None]:
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_config(saved.model, directory)
        if saved.loader is not None and saved.trainer.speaks:
            write(saved.loader, directory, place(saved.mesh))
        return NOTHING, None

    refuse_on_disk(saved.model, "save")
    if saved.loader is not None:
        check(saved.loader)
    saved.trainer.save(directory, saved.form)
    if saved.optimizer is not None:
        optimizer.save(directory, saved.optimizer, saved.trainer)
    saved.trainer.transport.meeting.hold("the configuration of what is saved", config)


def save_adapter(model: nn.Module, gather: Callable[[], nn.Module], directory: str | Path) -> None:
    """Write a PEFT model's adapters; gather: the model with the weights of all ranks. InputError if it has none."""
    if not hasattr(model, "peft_config"):
        raise InputError(
            f"{type(model).__name__} has no adapters", "save_adapter",
            "save all weights with save(directory), or make the model with peft.get_peft_model",
        )  # fmt: skip
    gathered = gather()
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone or dist.get_rank() == 0:
        gathered.save_pretrained(str(directory))  # type: ignore[operator]
    if not alone:
        dist.barrier()


# --- The state of a training run: what of it goes to a checkpoint, and how it is taken up again ----------------------
#
# Terms: *what* is saved is some of weights, optimizer, scheduler, loader, random (generators), extra (the caller's
# own).


WEIGHTS, OPTIMIZER, SCHEDULER, LOADER, RANDOM, EXTRA = "weights", "optimizer", "scheduler", "loader", "random", "extra"
SCHEDULER_CLASS = "scheduler_class"  # whose state that of the scheduler is
ALL = (WEIGHTS, OPTIMIZER, SCHEDULER, LOADER, RANDOM, EXTRA)


@dataclass(frozen=True)
class State:
    """saved: with the model, and the optimizer and loader if there are. has: which of ALL."""

    saved: Saved
    scheduler: Any
    extra: Mapping[str, Any]
    has: Collection[str]

    @property
    def form(self) -> WeightLayout:
        """What of the model no program reads."""
        manifest = self.saved.trainer.program.manifest
        return format_of(self.saved.model, {spec.name for spec in manifest.parameters})

    @property
    def process(self) -> tuple[int, int]:
        """Which this one is, of how many."""
        ranks = self.saved.trainer.transport.ranks
        return ranks[0] // len(ranks), self.saved.trainer.program.manifest.mesh.size // len(ranks)


@dataclass(frozen=True)
class Restored:
    """What was taken up.

    Attributes:
        step: Of the checkpoint.
        folder: Its folder.
        extra: What `save(step, extra)` was given.
        begun: Parameters that train now and were not stepped when it was saved: the optimizer has no state of them yet.
    """

    step: int
    folder: Path
    extra: Mapping[str, Any]
    begun: tuple[str, ...] = ()


def taken(state: State, copied: bool) -> ProcessState:
    """InputError for what has no values, or cannot be saved."""
    saved, trainer = state.saved, state.saved.trainer
    trainer.own.check_step("save")
    pieces: list[writing.Piece] = []
    optimizer_state, written = None, writing.boxes_written(trainer)
    if WEIGHTS in state.has:
        form = state.form
        if 0 in trainer.transport.ranks:
            check_rest(form)
        pieces += writing.weights(trainer, written, form.rest)
    if OPTIMIZER in state.has:
        assert saved.optimizer is not None
        more, optimizer_state = writing.optimizer(trainer, written, saved.optimizer)
        pieces += more
    other: dict[str, Any] = {}
    if SCHEDULER in state.has:
        other[SCHEDULER] = packed(state.scheduler.state_dict(), "the scheduler's state")
        other[SCHEDULER_CLASS] = type(state.scheduler).__name__
    if LOADER in state.has and trainer.speaks:
        anywhere = bool(getattr(saved.loader, ANY_SHARE, False))
        position = packed(saved.loader.state_dict(), "the loader's state")
        other[LOADER] = {"share": list(place(saved.mesh)), "any": anywhere, "position": position}
    if RANDOM in state.has:
        other[RANDOM] = packed(_drawn(trainer.device), "random numbers")
    if EXTRA in state.has and 0 in trainer.transport.ranks:
        other[EXTRA] = packed(dict(state.extra), "extra")
    return ProcessState(writing.copies(pieces) if copied else pieces, optimizer_state, other)


def about(state: State, step: int) -> dict[str, Any]:
    """What the index says of the whole."""
    manifest = state.saved.trainer.program.manifest
    return {
        "step": step, "model": type(state.saved.model).__name__, "mesh": str(manifest.mesh), "zero": manifest.zero,
        "processes": state.process[1], "has": [part for part in ALL if part in state.has],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "csc": csc.__version__, "torch": torch.__version__,
    }  # fmt: skip


def expected(state: State) -> dict[str, Expected]:
    """Of the model, under its names."""
    specs = state.saved.trainer.program.manifest.parameters
    wanted = {spec.name: Expected(spec.shape, spec.dtype) for spec in specs}
    return wanted | {name: Expected(tuple(tensor.shape), tensor.dtype) for name, tensor in state.form.rest.items()}


def _drawn(device: torch.device) -> dict[str, Any]:
    """What generators of random numbers will draw next."""
    on_device = {} if device.type == "cpu" else {"device": devices.generator(device)}
    numbers = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    return {"torch": torch.get_rng_state(), **numbers, **on_device}


def _draw_again(drawn: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(drawn["torch"])
    random.setstate(drawn["python"])
    np.random.set_state(drawn["numpy"])
    if "device" in drawn and device.type != "cpu":
        devices.set_generator(device, drawn["device"])


def take_up(state: State, index: StepIndex) -> Restored:
    """InputError, with nothing changed, for what is missing or damaged; StepFailed if that is so on another rank."""
    saved, meeting = state.saved, state.saved.trainer.transport.meeting
    changes: list[Callable[[], Any]] = []
    moves: list[Move] = []

    def ready() -> tuple[Vote, dict[str, Any]]:
        absent = [part for part in state.has if part not in index.has]
        if absent:
            raise InputError(
                f"it has {', '.join(index.has)}, and no {absent[0]}", str(index.folder / FILE),
                f"load what it has: load(only={[part for part in state.has if part in index.has]!r})",
            )  # fmt: skip
        if WEIGHTS in state.has:
            restoring.check_model(index, expected(state))
        owned = [*optimizer.owned(saved.trainer), *optimizer.mirrored(saved.trainer)]
        if OPTIMIZER in state.has:
            assert saved.optimizer is not None
            restored = restoring.optimizer(index, saved.optimizer, owned)
            changes.append(partial(optimizer.put, saved.optimizer, restored))
        of_process = restoring.state(index, state.process[0])
        first = restoring.state(index, 0)
        if SCHEDULER in state.has:
            _check_scheduler(state, first, index)
            before = copy.deepcopy(state.scheduler.state_dict())
            moves.append(Move(state.scheduler, unpacked(first[SCHEDULER]), before))
        if LOADER in state.has:
            moves.append(Move(saved.loader, _position(state, index), None))
        rest = {}
        if WEIGHTS in state.has:
            restoring.verify(
                index, [(s.name, saved.trainer.own.box(s) or whole_box(s.shape)) for s in saved.trainer.own.specs]
            )
            rest = _rest(state, index)
        return NOTHING, {"rest": rest, "random": of_process.get(RANDOM), "extra": unpacked(first.get(EXTRA, {}))}

    def careful() -> tuple[Vote, dict[str, Any]]:
        try:
            return ready()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"it was not written by csc: {type(error).__name__}: {error}", str(index.folder / FILE), OLDER
            ) from error

    state_found = meeting.hold("load a checkpoint", careful)
    _moved(meeting, moves, str(index.folder / FILE))  # one may refuse: then nothing else was touched
    for change in changes:
        change()
    if WEIGHTS in state.has:
        saved.trainer.own.fill(lambda name, box, target: restoring.fill(index, name, box, target))
        put_rest(saved.model, state.form, state_found["rest"])
        saved.look()
    if RANDOM in state.has:
        _draw_again(unpacked(state_found["random"]), saved.trainer.device)
    return Restored(index.step, index.folder, state_found["extra"], _begun(state, index))


def _check_scheduler(state: State, saved_state: Mapping[str, Any], index: StepIndex) -> None:
    """InputError for the state of another class, which torch's schedulers would take without a word."""
    class_now = type(state.scheduler).__name__
    then = saved_state.get(SCHEDULER_CLASS, class_now)
    if then != class_now:
        raise InputError(
            f"it has the state of a {then}, and the scheduler is a {class_now}", str(index.folder / FILE),
            f"make the {then} that was saved, or leave the scheduler out: load(only=['weights', 'optimizer', ...])",
        )  # fmt: skip


class Move(NamedTuple):
    """State for a scheduler or loader. before: what it has now; None: it is not asked."""

    one: Any
    state: Any
    before: Any


def _moved(meeting: Meeting, moves: Sequence[Move], where: str) -> None:
    """Give each its state. If one refuses, on any rank, all raise, and those that were asked have what they had. A
    loader stands last and is not asked: one of torchdata would start its workers to say where it is.
    """

    def move() -> tuple[Vote, None]:
        for obj, state, _ in moves:
            try:
                obj.load_state_dict(state)
            except CscError:
                raise
            except Exception as error:  # classes of the user's raise what they like
                raise InputError(
                    f"the {type(obj).__name__} does not take its state: {type(error).__name__}: {first_line(error)}",
                    where, "make it as it was made for that save, or leave it out: load(only=[...])",
                ) from error  # fmt: skip
        return NOTHING, None

    try:
        meeting.hold("load a checkpoint", move)
    except BaseException:
        for obj, _, before in moves:
            if before is not None:
                with suppress(Exception):  # of one that refuses whatever it is given: what it has said is raised
                    obj.load_state_dict(before)
        raise


def _rest(state: State, index: StepIndex) -> dict[str, torch.Tensor]:
    """What no program reads, of the processes that keep it."""
    form = state.form
    if 0 not in state.saved.trainer.transport.ranks and on_meta(form):
        return {}
    targets = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in form.rest.items()}
    for name, target in targets.items():
        restoring.fill(index, name, whole_box(target.shape), target)
    return targets


def _position(state: State, index: StepIndex) -> Any:
    """Of this process' share of the samples."""
    mine = list(place(state.saved.mesh))
    check(state.saved.loader)
    shares_there = []
    for process in range(len(index.states)):
        position = restoring.state(index, process).get(LOADER)
        if position is not None and (position["share"] == mine or position["any"]):
            return unpacked(position["position"])
        shares_there += [position["share"]] if position is not None else []
    shares = ", ".join(f"{share} of {count}" for share, count in shares_there)
    raise InputError(
        f"it has the loader's positions of shares {shares}, and this process loads share {mine[0]} of {mine[1]}",
        str(index.folder / FILE),
        "resume with the dp that it was saved with, take a loader of csc.balanced, whose position is for any, or leave "
        "the loader out: load(only=['weights', 'optimizer', 'scheduler', 'random'])",
    )  # fmt: skip


def _begun(state: State, index: StepIndex) -> tuple[str, ...]:
    """What trains now and did not then."""
    if OPTIMIZER not in state.has or index.optimizer is None:
        return ()
    trained = {name for group in index.optimizer["groups"] for name in group["names"]}
    specs = state.saved.trainer.program.manifest.parameters
    return tuple(spec.name for spec in specs if spec.trainable and spec.name not in trained)
