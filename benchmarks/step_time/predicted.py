"""What `csc profile` and a plan say of a step, beside the step: python -m benchmarks.step_time.predicted [--fuse]

Of each case the functions are measured (`csc profile`), a plan is made with that, and steps run. predicted: seconds of
F, B and W of all regions and microbatches; measured: CPU seconds of a step of all ranks in this process, one thread. So
the difference is what the runtime takes besides, and what functions take in a step and not in a profile.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import torch
from csc.passes.pipeline_problem import problem

import csc
from benchmarks.step_time.cases import Case
from benchmarks.step_time.measure import _seconds
from benchmarks.step_time.models import build
from csc.reports.profiling import profile

ROUNDS = 9
CASES = [
    Case("llama", 128, 128),
    Case("llama", 512, 256),
    Case("llama", 512, 256, pp=2),
    Case("llava", 512, 256, frozen="encoder", pp=2),
]


def of_case(case: Case, fuse: bool) -> tuple[float, float, float]:
    """(predicted by the fitted model, predicted by what was measured, measured) seconds."""
    model, batch = build(case)
    compiled = csc.compile(model, example=dict(batch), mesh={"pp": case.pp}, check=False, fuse=fuse)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "here.toml")
        found = profile(compiled, output=file, wires=False)
        modelled = sum(row.regions * sum(row.modelled) for row in found.rows)
        planned = compiled.with_options(hardware=str(file))
        units = problem(planned.program, planned.options).units
        predicted = sum(unit.forward + unit.backward_input + unit.backward_weight for unit in units)
        assert planned.program.plan is not None and planned.program.plan.costs.startswith("measured on")

    def step() -> torch.Tensor:
        return compiled.train_step(dict(batch))

    for _ in range(2):
        _seconds(step, model)
    return modelled, predicted, median(_seconds(step, model) for _ in range(ROUNDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuse", action="store_true", help="functions as Inductor compiles them")
    parser.add_argument("--models", nargs="*", default=["llama", "llava"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| case | model, ms | profile, ms | step, ms | profile over step |\n| --- | --- | --- | --- | --- |")
    for case in CASES:
        if case.model in arguments.models:
            modelled, predicted, measured = of_case(case, arguments.fuse)
            figures = " | ".join(f"{1e3 * one:.1f}" for one in (modelled, predicted, measured))
            print(f"| {case} | {figures} | {predicted / measured:.3f} |", flush=True)


if __name__ == "__main__":
    main()
