"""The cases: a configuration, what of it is frozen, ranks, hardware. A step has SAMPLES samples for each rank."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from benchmarks.mllm.configurations import CONFIGURATIONS
from benchmarks.mllm.trace import FROZEN
from benchmarks.pipeline.cases import Case

RANKS = (24, 64, 256)
HARDWARE = ("h100", "a100")
SAMPLES = 4


def samples(case: Case) -> int:
    """Of a step."""
    return SAMPLES * case.ranks


QUICK = (
    Case("VLM-S", "all trainable", 24, "h100"),
    Case("VLM-S", "projector only", 24, "a100"),
    Case("VALM-S", "encoder frozen", 24, "h100"),
    Case("VLM-M", "encoder frozen", 64, "h100"),
)


def cases(quick: bool, configurations: Collection[str], ranks: Collection[int], only: str = "*") -> list[Case]:
    """All, or those of QUICK; of these the ones that are asked for, if any are. only: a glob over their names."""
    listed = QUICK if quick else tuple(
        Case(configuration, frozen, count, device)
        for configuration in CONFIGURATIONS
        for count in RANKS
        for device in HARDWARE
        for frozen in FROZEN
    )  # fmt: skip
    return [
        case for case in listed
        if (not configurations or case.configuration in configurations)
        and (not ranks or case.ranks in ranks)
        and fnmatchcase(case.name, only)
    ]  # fmt: skip
