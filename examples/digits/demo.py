"""`make demo`: a LLaVA learns to read handwritten digits, on real scans, on a pipeline of 4 ranks.

    python examples/digits/demo.py --output build/demo

1. csc compiles the two phases of the LLaVA recipe, projector only and projector + LLM: it shows what freezing prunes
   and what the plan expects, and compares loss and gradients of both with eager PyTorch.
2. A vision encoder and an LLM are trained on their own (plain PyTorch; the LLM in a process beside this one, since the
   beginning) and joined into an HF LLaVA.
3. torchrun trains both phases on 4 ranks; held-out accuracy is measured before and after, by greedy decoding. Phase 1
   asks for the top and the bottom row only, so that phase 2 has something to learn: two thirds is its ceiling.

Leaves in the output directory: answers.svg (held-out images and what the model answered), timeline.html (the plan
beside a measured step), program/phase1 and program/phase2 (read rank_1.py), the weights, result.json. Every
process has one thread: with more, those of four ranks would wait for each other on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from data import held_out_images, split_scans
from evaluate import answer, exact_match
from models import build_llava, build_llm, join, save_weights
from picture import answers_picture
from pretrain import pretrain_encoder
from progress import showing
from recipe import PHASES, phase_batches
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import csc
from csc import cores
from csc.analysis.explain import explain
from csc.commands.explain_command import explain_table
from csc.commands.simulate_command import timeline
from csc.commands.tables import step_text
from csc.reports.forecast import forecast
from csc.reports.verification import verify

RANKS = 4
SHOWN = 6  # held-out images in the picture
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


def compile_and_check(model: nn.Module, output: Path, seed: int) -> tuple[float, list[str]]:
    """Write both phases' programs. Returns the largest relative difference of a gradient from eager PyTorch's, and the
    parameters whose gradient is missing.
    """
    console.print(f"tracing, planning and writing programs for {RANKS} ranks ...")
    phases = compiled_phases(model, seed)
    for number, compiled in enumerate(phases, 1):
        components, _ = explain(compiled.program)
        console.print(explain_table(f"phase {number}: {', '.join(FROZEN[number - 1])} frozen", components))
        expected = forecast(compiled, None)
        for rank, holds in enumerate(expected.holds):
            console.print(f"rank {rank}: {holds}", highlight=False, markup=False)
        console.print(f"the plan, {expected.schedule}: {step_text(expected)}", highlight=False, markup=False)
        compiled.write(output / "program" / f"phase{number}")
    console.print("comparing loss and gradients with eager PyTorch ...")
    checks = [verify(compiled) for compiled in phases]
    worst = max(check.grad_rel_max for check in checks)
    missing = sorted({name for check in checks for name in check.params_missing})
    console.print(
        f"against eager PyTorch: {sum(check.params_checked for check in checks)} gradients compared, "
        f"{len(missing)} missing, largest relative difference {worst:.1e}"
    )
    return worst, missing


@contextmanager
def llm_beside(output: Path, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    """The LLM's pre-training in a process beside this one, which is stopped if this one fails."""
    command = [sys.executable, str(HERE / "pretrain.py"), "--output", str(output / "llm.safetensors")]
    with (output / "llm.txt").open("w") as said:
        process = subprocess.Popen(
            [*command, "--seed", str(seed)], stdout=said, stderr=subprocess.STDOUT, env=cores.environment()
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


def trained_llm(process: subprocess.Popen[bytes], output: Path, seed: int) -> LlamaForCausalLM:
    """Wait for it; ends this program if it failed."""
    if process.poll() is None:
        console.print("waiting for the LLM, which a process beside this one trains ...")
    if process.wait():
        said = "".join((output / "llm.txt").read_text().splitlines(keepends=True)[-15:])
        sys.exit(
            f"pre-training the LLM failed (exit code {process.returncode}); {output / 'llm.txt'} ends with:\n{said}"
        )
    console.print((output / "llm.txt").read_text().rstrip(), highlight=False, markup=False)
    llm = build_llm(seed)
    llm.load_state_dict(load_file(output / "llm.safetensors"))
    return llm


def train_on_ranks(output: Path, weights: Path, seed: int) -> None:
    """Run both phases under torchrun; ends this program if a rank fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(HERE / "train.py"), "--program", str(output / "program"), "--weights", str(weights)]
    command += ["--output", str(output), "--seed", str(seed)]
    code = subprocess.run(command, env=cores.environment()).returncode
    if code:
        sys.exit(
            f"training on {RANKS} ranks failed with exit code {code}: the first error of a rank above says why. "
            "If a rank was killed by signal 9, there was too little memory"
        )


def load_shards(model: nn.Module, directory: Path) -> None:
    """Take over the weights that the ranks wrote; what they do not use keeps its value."""
    for shard in sorted(directory.glob("*.safetensors")):
        model.load_state_dict(load_file(shard), strict=False)


def run(output: Path, seed: int) -> dict[str, object]:
    """The whole demo. Returns what goes to result.json."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, held_out = split_scans()
    images, digits = held_out_images(held_out)
    rows = torch.arange(SHOWN) % len(PHASES[1].rows_asked)
    accuracies: list[float] = []
    answers: dict[str, Tensor] = {}
    output.mkdir(parents=True, exist_ok=True)

    def look(moment: str) -> None:
        accuracies.append(accuracy(model, images, digits, moment))
        model.eval()
        answers[moment] = answer(model, images[:SHOWN], rows)
        model.train()

    with llm_beside(output, seed) as process:
        heading("1  csc compiles the two phases of the recipe", started)
        worst, missing = compile_and_check(build_llava(seed).to(device), output, seed)

        heading(f"2  encoder and LLM, each on its own, on {device.type}", started)
        with showing() as report:
            encoder = pretrain_encoder(training, device, seed, report)
        llm = trained_llm(process, output, seed)
    model = join(encoder, llm, seed).to(device)
    weights = output / "joined.safetensors"
    save_weights(model, weights)
    look("before")

    heading(f"3  {RANKS} ranks: the projector alone, then projector and LLM", started)
    train_on_ranks(output, weights, seed)
    for phase in PHASES:
        load_shards(model, output / f"weights_{phase.folder}")
        look(f"after {phase.name}")
    save_weights(model, output / "trained.safetensors")

    heading("4  what to look at", started)
    program = output / "program" / PHASES[1].folder
    timeline([program, output / "measured.json"], page=output / "timeline.html")
    if cores.here() < RANKS:
        console.print(f"the plan gives each of {RANKS} ranks a core; here they share {cores.here()}", highlight=False)
    (output / "answers.svg").write_text(answers_picture(images[:SHOWN], rows, digits[:SHOWN], answers))
    for file, what in (
        (output / "answers.svg", f"{SHOWN} held-out images and what the model answered: open it in a browser"),
        (output / "timeline.html", "phase 2: the plan beside a step that was measured: open it in a browser"),
        (program / "rank_1.py", "what rank 1 runs, as text: open it in an editor"),
        (program / "schedule.txt", "who does what, in which order"),
    ):
        console.print(f"{file.resolve()}\n    {what}", soft_wrap=True, highlight=False, markup=False)
    return {
        "accuracy_before": accuracies[0],
        "accuracy_phase1": accuracies[1],
        "accuracy_phase2": accuracies[2],
        "parity_grad_rel_max": worst,
        "params_missing": missing,
        "held_out_questions": 3 * len(images),
        "seconds": round(time.perf_counter() - started, 1),
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
