"""`make demo`: a LLaVA learns to read handwritten digits, on real scans, on a pipeline of 4 ranks.

    python examples/digits/demo.py --output build/demo

1. A vision encoder and an LLM are trained on their own (one process, plain PyTorch) and joined into an HF LLaVA.
2. csc compiles the two phases of the LLaVA recipe, projector only and projector + LLM, shows what freezing prunes,
   and compares loss and gradients of both with eager PyTorch.
3. torchrun trains each phase on 4 ranks; held-out accuracy is measured before and after, by greedy decoding. Phase 1
   asks for the top and the bottom row only, so that phase 2 has something to learn: two thirds is its ceiling.

Leaves in the output directory: program/phase1 and program/phase2 (read rank_1.py), the weights, result.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from data import held_out_images, split_scans
from evaluate import exact_match
from models import join, save_weights
from pretrain import pretrain_encoder, pretrain_llm
from progress import showing
from recipe import PHASES, phase_batches
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

import csc
from csc.analysis.explain import explain
from csc.commands.explain_command import explain_table
from csc.reports.verification import verify

RANKS = 4
FROZEN = (["vision_tower", "language_model"], ["vision_tower"])
HERE = Path(__file__).parent
console = Console(width=None if sys.stdout.isatty() else 160)


def heading(text: str, started: float) -> None:
    console.rule(f"[bold]{text}[/]  ({time.perf_counter() - started:.0f} s)", align="left")


def accuracy(model: nn.Module, images: torch.Tensor, digits: torch.Tensor, moment: str) -> float:
    """Share of held-out answers that are right in all three digits."""
    shares = exact_match(model, images, digits)
    share = sum(shares.values()) / len(shares)
    rows = ", ".join(f"{row} {value:.1%}" for row, value in shares.items())
    console.print(f"held-out answers exactly right, {moment}: [bold]{share:.1%}[/]  ({rows})", highlight=False)
    return share


def compiled_phases(model: nn.Module, seed: int) -> list[csc.CompiledModel]:
    """The two phases of the recipe; the second is compiled from the trace of the first."""
    training, _ = split_scans()
    phase = PHASES[0]
    first = csc.compile(
        model,
        mesh=csc.Mesh(pp=RANKS),
        example=next(phase_batches(phase, training, seed)),
        freeze=FROZEN[0],
        microbatches=phase.microbatches,
    )
    return [first, first.with_options(freeze=FROZEN[1], microbatches=PHASES[1].microbatches)]


def train_on_ranks(phase: int, program: Path, weights: Path, output: Path, seed: int) -> None:
    """Run one phase under torchrun; ends this program if a rank fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(HERE / "train.py"), "--phase", str(phase), "--program", str(program)]
    command += ["--weights", str(weights), "--output", str(output), "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    finished = subprocess.run(command, env=environment)
    if finished.returncode:
        sys.exit(f"training {PHASES[phase].name} on {RANKS} ranks failed; the output above says why")


def load_shards(model: nn.Module, directory: Path) -> None:
    """Take over the weights that the ranks wrote; what they do not use keeps its value."""
    for shard in sorted(directory.glob("*.safetensors")):
        model.load_state_dict(load_file(shard), strict=False)


def run(output: Path, seed: int) -> dict[str, object]:
    """The whole demo. Returns what goes to result.json."""
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, held_out = split_scans()
    images, digits = held_out_images(held_out)
    output.mkdir(parents=True, exist_ok=True)

    heading(f"1  encoder and LLM, each on its own, on {device.type}", started)
    with showing() as report:
        encoder = pretrain_encoder(training, device, seed, report)
        llm = pretrain_llm(device, seed, report)
    model = join(encoder, llm, seed).to(device)
    start = output / "joined.safetensors"
    save_weights(model, start)
    accuracies = [accuracy(model, images, digits, "before")]

    heading("2  csc compiles the two phases", started)
    phases = compiled_phases(model, seed)
    programs = []
    for number, compiled in enumerate(phases, 1):
        components, _ = explain(compiled.program)
        console.print(explain_table(f"phase {number}: {', '.join(FROZEN[number - 1])} frozen", components))
        programs.append(compiled.write(output / "program" / f"phase{number}"))
    checks = [verify(compiled) for compiled in phases]
    worst = max(check.grad_rel_max for check in checks)
    console.print(
        f"against eager PyTorch: {sum(check.params_checked for check in checks)} gradients compared, "
        f"{sum(len(check.params_missing) for check in checks)} missing, largest relative difference {worst:.1e}"
    )

    weights = start
    for number, phase in enumerate(PHASES):
        heading(f"{number + 3}  {phase.name}: {', '.join(FROZEN[number])} frozen, {RANKS} ranks", started)
        trained = output / f"weights_phase{number + 1}"
        train_on_ranks(number, programs[number], weights, trained, seed)
        load_shards(model, trained)
        accuracies.append(accuracy(model, images, digits, f"after {phase.name}"))
        weights = output / f"phase{number + 1}.safetensors"
        save_weights(model, weights)

    seconds = time.perf_counter() - started
    console.print(f"\nthe emitted programs: {programs[0]}, {programs[1]} (start with rank_1.py)", soft_wrap=True)
    return {
        "accuracy_before": accuracies[0],
        "accuracy_phase1": accuracies[1],
        "accuracy_phase2": accuracies[2],
        "parity_grad_rel_max": worst,
        "params_missing": sorted({name for check in checks for name in check.params_missing}),
        "held_out_questions": 3 * len(images),
        "seconds": round(seconds, 1),
        "ranks": RANKS,
        "device": device.type,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/demo"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = run(arguments.output, arguments.seed)
    file = arguments.output / "result.json"
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(file)
    console.print_json(json.dumps(result))
    if result["accuracy_phase2"] < 0.85 or result["params_missing"]:
        sys.exit("the demo missed its aim: 85 % of the held-out answers exactly right, no gradient missing")


if __name__ == "__main__":
    main()
