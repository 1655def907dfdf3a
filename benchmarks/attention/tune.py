"""Times configurations of the kernels on the GPU at hand: what csc.kernels.triton_launch is to be set to.

    tune(head_dim, tokens, progress) -> list[Tried]      causal, bfloat16, every kernel alone

A configuration that cannot be built or launched (registers, shared memory) is reported with its error, not hidden. They
are built side by side beforehand, each in a process that leaves it in Triton's cache. What each computes is compared
with what the default does: a fast one that is wrong is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context

import torch
from csc.kernels import triton_launch
from csc.kernels.mask import tiles
from csc.kernels.triton_launch import Config, HeadDimConfigs, architecture, choose

from benchmarks.attention.masks import mask
from benchmarks.attention.timing import seconds_on_gpu

HEADS, KV_HEADS = 32, 8
FEW_TOKENS = 1024  # what is built for these is built for all
MOST_JOBS = 14  # each holds a context of the device


@dataclass(frozen=True)
class Tried:
    kernel: str  # forward, dq or dkv
    config: Config
    default: bool
    seconds: float | None  # dq and dkv: of the whole backward with the others at their default
    difference: float | None  # of its results from the default's, the largest one, relative to the largest entry
    error: str | None


@dataclass(frozen=True)
class Trial:
    """A causal attention, forward and backward, whose kernels are launched with one configuration or another."""

    default: HeadDimConfigs
    forward: Callable[[HeadDimConfigs], tuple[torch.Tensor, ...]]
    backward: Callable[[HeadDimConfigs], tuple[torch.Tensor, ...]]

    def launch(self, kernel: str, choice: HeadDimConfigs) -> tuple[torch.Tensor, ...]:
        return self.forward(choice) if kernel == "forward" else self.backward(choice)


def tune(head_dim: int, tokens: int, progress: Callable[[str, int, int], None]) -> list[Tried]:
    trial = _trial(head_dim, tokens)
    listed = list(_candidates(trial.default))
    _build(head_dim, len(listed))
    found: list[Tried] = []
    for kernel, config, choice in listed:
        seconds, apart, error = None, None, None
        try:
            wanted, own = trial.launch(kernel, trial.default), trial.launch(kernel, choice)
            apart = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(own, wanted))
            seconds = seconds_on_gpu(partial(trial.launch, kernel, choice), 0.2)
        except Exception as problem:  # compilers and launchers raise errors of many kinds
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        found.append(Tried(kernel, config, choice == trial.default, seconds, apart, error))
        progress("tuning", len(found), len(listed))
    return found


def _trial(head_dim: int, tokens: int) -> Trial:
    default = choose(architecture(torch.device("cuda")), head_dim, torch.bfloat16)
    given = mask("causal", tokens).to("cuda")
    rest = (given, tiles(given, *default.tile), head_dim**-0.5, 0.0)

    def heads(count: int) -> torch.Tensor:
        return torch.randn(1, tokens, count, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    q, k, v, d_out = heads(HEADS), heads(KV_HEADS), heads(KV_HEADS), heads(HEADS)
    out, lse = triton_launch.forward(q, k, v, *rest)
    return Trial(
        default,
        lambda choice: triton_launch.forward(q, k, v, *rest, choice),
        lambda choice: triton_launch.backward(d_out, q, k, v, out, lse, *rest, choice),
    )


def _build(head_dim: int, count: int) -> None:
    """Launch all candidates once in processes beside this one: a kernel is built in the one that comes first."""
    jobs = min(os.cpu_count() or 1, MOST_JOBS)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_launched, head_dim), [range(job, count, jobs) for job in range(jobs)]))


def _launched(head_dim: int, numbers: range) -> None:
    torch.set_num_threads(1)  # there are as many processes as cores
    trial = _trial(head_dim, FEW_TOKENS)
    listed = list(_candidates(trial.default))
    for number in numbers:
        kernel, _, choice = listed[number]
        with suppress(Exception):  # told when it is timed
            trial.launch(kernel, choice)
    torch.cuda.synchronize()


def _candidates(default: HeadDimConfigs) -> Iterator[tuple[str, Config, HeadDimConfigs]]:
    """Blocks x warps x stages around the default, by kernel."""
    for kernel, sizes in (
        ("forward", ((128, 128), (128, 64), (128, 32), (64, 64))),
        ("dq", ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32))),
        ("dkv", ((64, 128), (32, 128), (128, 128), (64, 64), (128, 64))),
    ):
        for (block_q, block_k), warps, stages in product(sizes, (4, 8), (2, 3)):
            config = Config(block_q, block_k, warps, stages, default.forward.descriptors)
            setting = (("kv", config),) if kernel == "dkv" else config
            field = "plain" if kernel == "forward" else kernel  # what a causal mask is launched with
            is_default = kernel == "forward" and config == default.of_forward(1, False, False)
            yield kernel, config, default if is_default else replace(default, **{field: setting})
