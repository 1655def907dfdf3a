"""The cases of the benchmark and their numbers.

Terms
  case    a configuration, what of it is frozen, a number of ranks, hardware; always 24 microbatches
  heavy   a case with frozen encoders that hold a third or more of the forward FLOPs
  layer   a unit that is one layer of a component; the others are embeddings, projectors, norms, heads

    cases(quick) -> [Case]
    numbers(configuration, devices) -> {(device, frozen): Numbers}     traces the configuration, once for all its cases
    of_case(numbers, case) -> Problem                                  without state: its memory is that of activations
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.mllm.configurations import CONFIGURATIONS
from benchmarks.mllm.problem import encoder_share, problem
from benchmarks.mllm.trace import FROZEN, program
from csc.analysis.hardware import hardware
from csc.planning.problem import Problem

MICROBATCHES = 24
RANKS = (6, 12, 24)
HARDWARE = ("a40", "h100")
HEAVY = 1 / 3


@dataclass(frozen=True)
class Case:
    """One row of the benchmark."""

    configuration: str
    frozen: str
    ranks: int
    hardware: str

    @property
    def name(self) -> str:
        return f"{self.configuration}, {self.frozen}, {self.ranks} ranks, {self.hardware}"


# Two cores plan for them in minutes: every frozen set, encoders beside each other, and one case that is heavy.
QUICK = (
    Case("VLM-S", "all trainable", 6, "a40"),
    Case("VLM-S", "encoder frozen", 6, "a40"),
    Case("VALM-S", "projector only", 6, "a40"),
    Case("VLM-M", "encoder frozen", 6, "a40"),
)


@dataclass(frozen=True)
class Numbers:
    """A configuration with a frozen set on hardware, for any number of ranks.

    layers[u]: unit u is a layer. encoders: the encoders' share of the forward FLOPs. device: bytes of memory of a rank,
    reserved: what of them its process takes for itself.
    """

    problem: Problem
    layers: tuple[bool, ...]
    encoders: float
    device: float
    reserved: float
    notes: tuple[str, ...]

    @property
    def heavy(self) -> bool:
        """True if the encoders hold a third or more of the forward FLOPs and nothing in them trains."""
        frozen = not any(u.has_w for u in self.problem.units if u.component in ("vision", "audio"))
        return frozen and self.encoders >= HEAVY


def cases(quick: bool = False) -> list[Case]:
    """All cases; quick: those of QUICK."""
    if quick:
        return list(QUICK)
    return [
        Case(configuration, frozen, ranks, device)
        for configuration in CONFIGURATIONS
        for frozen in FROZEN
        for ranks in RANKS
        for device in HARDWARE
    ]


def numbers(configuration: str, devices: Sequence[str]) -> dict[tuple[str, str], Numbers]:
    """By hardware and frozen set. The problems have RANKS[0] ranks, and the state of their units."""
    model = CONFIGURATIONS[configuration]
    share = encoder_share(model)
    return {
        (device, frozen): Numbers(
            problem(model, frozen, hardware(device), RANKS[0], MICROBATCHES),
            tuple(region.kind == "layer" for region in program(model, frozen).regions),
            share,
            hardware(device).memory,
            hardware(device).reserved,
            model.notes,
        )
        for device in devices
        for frozen in FROZEN
    }


def of_case(found: Numbers, case: Case) -> Problem:
    """The problem of a case, without what a rank holds besides activations."""
    units = tuple(replace(unit, state=0.0, working=0.0) for unit in found.problem.units)
    return replace(found.problem, units=units, ranks=case.ranks, waiting=False)
