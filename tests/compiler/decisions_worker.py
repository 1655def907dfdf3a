"""One rank of test_decisions.py: batches with several answers in turn, losses and gradients left in files.

main({"kind": "any", "mesh": "pp=2"}, directory)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

import csc
from csc.errors import InputError
from tests.compiler.test_decisions import Deciding, batch

BATCHES = (batch((2, 1), (4, 0)), batch((0, 0)), batch((1, 1), first=2), batch((0, 0), first=4), batch((1, 3), (4, 0)))


def main(case: dict[str, Any], directory: Path) -> None:
    compiled = csc.compile(Deciding(case["kind"]), mesh=case["mesh"], example=BATCHES[0], cache=False)
    losses, refused = list[float](), ""
    try:
        for number, given in enumerate(BATCHES):
            compiled.zero_grad()
            losses.append(float(compiled.train_step(given)))
            gradients = {name: p.grad.contiguous() for name, p in compiled.named_parameters() if p.grad is not None}
            save_file(gradients, directory / f"gradients_{number}_{dist.get_rank()}.safetensors")
    except InputError as error:
        refused = str(error)
    traced = len(compiled.compiler.captures)
    result = {"losses": losses, "refused": refused, "captures": traced}
    (directory / f"result_{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
