"""What recomputation buys: the plans of one configuration under memory limits, for every choice of pass `recompute`.

    python -m benchmarks.mllm.recompute VLM-S --ranks 4 --memory 80 40 30 25 --freeze vision

Expected times and bytes of csc's plans (1F1B, four microbatches a rank); nothing is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from csc.passes.freeze import FreezePass
from csc.passes.partition import PartitionPass
from csc.passes.pipeline import of_options
from csc.passes.prune import PrunePass
from csc.passes.recompute import AUTO, FULL, NONE, SELECTIVE, RecomputePass
from csc.passes.split import SplitPass

from benchmarks.mllm.configurations import CONFIGURATIONS
from benchmarks.mllm.trace import traced
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program


def planned(whole: Program, options: Options) -> Program:
    """The traced program with its plan. InputError if nothing fits."""
    for one in (FreezePass, PrunePass, RecomputePass, SplitPass, PartitionPass):
        whole = of_options(one(), options)(whole, options)
    return whole


def row(whole: Program, options: Options) -> str:
    """`2.564 s, 35.7 GB, 32 of 63 regions recompute`."""
    try:
        found = planned(whole, options)
    except InputError:
        return "does not fit"
    assert found.plan is not None
    again = sum(found.variants[region.variant].saves is not None for region in found.regions)
    peak = max(found.plan.peak_memory) / 1e9
    return f"{found.plan.makespan:.3f} s, {peak:.1f} GB, {again} of {len(found.regions)} regions recompute"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configuration", choices=sorted(CONFIGURATIONS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--memory", type=float, nargs="+", default=[40.0], help="GB of one rank")
    parser.add_argument("--freeze", nargs="*", default=[])
    parser.add_argument("--hardware", default="h100")
    given = parser.parse_args(arguments)
    whole = traced(CONFIGURATIONS[given.configuration])
    for memory in given.memory:
        for choice in (NONE, SELECTIVE, FULL, AUTO):
            options = Options(
                mesh=Mesh(pp=given.ranks), microbatches=4 * given.ranks, hardware=given.hardware, schedule="1f1b",
                memory=int(memory * 1e9), freeze=tuple(given.freeze), recompute=(("*", choice),),
            )  # fmt: skip
            print(f"{memory:g} GB, {choice}: {row(whole, options)}", flush=True)


if __name__ == "__main__":
    main()
