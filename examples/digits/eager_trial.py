"""The whole demo in one process and without csc: pretrain, both phases, held-out accuracy after each.

    python examples/digits/eager_trial.py --seed 0 --split-seed 0 --threads 2

Prints one JSON object with the seconds of each part, the losses at the ends and the accuracies. Use it to try
settings, or as the reference that a compiled run is compared with.
"""

import argparse
import json
import time

import torch
from data import held_out_images, split_scans
from eager import EagerTrainer
from evaluate import exact_match
from models import join
from pretrain import pretrain_encoder, pretrain_llm
from recipe import PHASES, freeze, phase_batches, run_phase


def run(seed: int, split_seed: int, device: torch.device) -> dict[str, dict[str, object]]:
    """Return the seconds and last loss of each part, and the exact-match shares at each evaluation."""
    training, held_out = split_scans(seed=split_seed)
    images, digits = held_out_images(held_out)
    seconds: dict[str, object] = {}
    losses: dict[str, object] = {}
    accuracies: dict[str, object] = {}
    started = time.perf_counter()

    def lap(part: str) -> None:
        nonlocal started
        now = time.perf_counter()
        seconds[part] = round(now - started, 1)
        started = now

    def report(phase: str, step: int, steps: int, loss: float) -> None:
        losses[phase] = round(loss, 4)

    encoder = pretrain_encoder(training, device, seed, report)
    lap("encoder")
    llm = pretrain_llm(device, seed, report)
    lap("llm")
    model = join(encoder, llm, seed).to(device)

    def evaluate(moment: str) -> None:
        shares = exact_match(model, images, digits)
        accuracies[moment] = {"all": round(sum(shares.values()) / len(shares), 4), **shares}
        lap(f"evaluation {moment}")

    evaluate("before")
    trainer = EagerTrainer(model, device)
    for number, phase in enumerate(PHASES):
        freeze(model, phase)
        run_phase(trainer, phase, phase_batches(phase, training, seed=10 * seed + number), report)
        lap(phase.name)
        evaluate(f"after {phase.name}")
    return {"seconds": seconds, "last loss": losses, "exact match": accuracies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="weights and batches")
    parser.add_argument("--split-seed", type=int, default=0, help="which scans are held out")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(run(arguments.seed, arguments.split_seed, device), indent=2))


if __name__ == "__main__":
    main()
