"""One phase of the recipe on one rank of an emitted program. Started by demo.py:

    torchrun --nproc-per-node 4 examples/digits/train.py --phase 0 --program DIR --weights FILE --output DIR

Neither the compiler nor transformers is imported: the program directory is all that a rank needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist
from data import split_scans
from progress import showing
from recipe import PHASES, phase_batches, run_phase

from csc.runtime.launch import setup_distributed
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", type=int, required=True, help="0: projector, 1: projector and LLM")
    parser.add_argument("--program", type=Path, required=True, help="directory that csc wrote")
    parser.add_argument("--weights", type=Path, required=True, help="safetensors to start from")
    parser.add_argument("--output", type=Path, required=True, help="directory for the trained weights")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    program = load(arguments.program)
    launch = setup_distributed(program.manifest.device)
    trainer = Trainer(program, weights=arguments.weights, device=launch.device)
    phase = PHASES[arguments.phase]
    training, _ = split_scans()
    batches = phase_batches(phase, training, seed=10 * arguments.seed + arguments.phase)
    with showing(quiet=launch.rank != 0) as report:
        run_phase(trainer, phase, batches, report)
    trainer.save(arguments.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
