"""An emitted program is text: edit a rank file, reorder the schedule, run what was edited.

python examples/edit_rank_file.py             writes build/emitted and build/edited, runs both; half a minute
diff -r build/emitted build/edited            afterwards: the two edits
python -m csc.run build/edited --steps 3      the edited program on its own, without the model

What to look at: norms that rank 1 prints from inside its forward; another order of work on rank 2, with the same loss
and the same gradients bit for bit; and an order that cannot run, refused before anything does.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from llava import example_batch, llava

from csc.errors import CscError
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer

EMITTED, EDITED, REFUSED = Path("build/emitted"), Path("build/edited"), Path("build/refused")


def edit(file: Path, old: str, new: str) -> None:
    """Replace text that is there once."""
    text = file.read_text().replace("|\n        ", "| ")  # a rank's order on one line
    assert text.count(old) == 1, f"{file}: {old!r} is there {text.count(old)} times"
    file.write_text(text.replace(old, new))
    for sign, lines in ("-", old), ("+", new):
        print("\n".join(f"  {sign} {line.strip()}" for line in lines.splitlines()))


def run(directory: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a step and the gradients, all ranks in this process."""
    program = load(directory)
    if program.edited:
        print(f"edited files: {', '.join(program.edited)}")
    trainer = Trainer(program)
    loss = trainer.train_step(example_batch())
    return loss, {name: p.grad for name, p in trainer.named_parameters() if p.grad is not None}


def main() -> None:
    for directory in (EMITTED, EDITED, REFUSED):
        shutil.rmtree(directory, ignore_errors=True)
    program = llava.with_options(schedule="1f1b", microbatches=2)
    program.write(EMITTED, with_weights=True)
    shutil.copytree(EMITTED, EDITED)

    print(f"{EDITED}/rank_1.py: print the norm of what every layer gives")
    kept = "saved_layers_1_to_2.append(saved)\n"
    shown = 'print(f"rank 1: {layer[:-1]} gives a norm of {float(hidden_states.norm()):.3f}")\n'
    edit(EDITED / "rank_1.py", kept, f"{kept}        {shown}")

    print(f"{EDITED}/schedule.txt: both forwards of rank 2 before its first backward")
    early = "B 2 0 | SEND B 2>1 0 | RECV F 1>2 1 | F 2 1"
    late = "RECV F 1>2 1 | F 2 1 | B 2 0 | SEND B 2>1 0"
    edit(EDITED / "schedule.txt", early, late)

    loss, gradients = run(EMITTED)
    loss_edited, gradients_edited = run(EDITED)
    same = gradients.keys() == gradients_edited.keys() and all(
        torch.equal(gradients[name], gradients_edited[name]) for name in gradients
    )
    print(f"loss {loss:.6f} as emitted, {loss_edited:.6f} as edited")
    print(f"{len(gradients)} gradients: {'the same bits' if same else 'DIFFERENT'}")

    print(f"{REFUSED}/schedule.txt: the backward of a microbatch before its forward")
    shutil.copytree(EDITED, REFUSED)
    edit(REFUSED / "schedule.txt", f"F 2 0 | {late}", "B 2 0 | SEND B 2>1 0 | RECV F 1>2 1 | F 2 1 | F 2 0")
    try:
        load(REFUSED)
    except CscError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
