"""What B and W have read for the last time is freed while they run, not behind them: the caller holds none of it."""

from __future__ import annotations

import importlib
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import csc
from csc.runtime.loaded_program import functions, load
from csc.torch_private.traces import pytree

ROOT = Path(__file__).parents[2]
WIDTH, TOKENS = 8, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.head = Block(), nn.ModuleList(Block() for _ in range(3)), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Lives(TorchDispatchMode):
    """The memory that calls make: bytes, which call read it last, and which ran when it was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.blocks: list[dict[str, int]] = []
        self._block: dict[int, int] = {}
        self._views = Counter[int]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        for one in pytree.tree_leaves((args, kwargs)):
            number = self._of(one)
            if number is not None:
                self.blocks[number]["read"] = self.calls
        results = operator(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(results):
            if isinstance(one, torch.Tensor):
                number = self._of(one)
                if number is None:
                    number = len(self.blocks)
                    self.blocks.append({"bytes": one.untyped_storage().nbytes(), "read": self.calls})
                    self._block[one.untyped_storage().data_ptr()] = number
                self._views[number] += 1
                weakref.finalize(one, self._gone, number, one.untyped_storage().data_ptr())
        return results

    def _of(self, one: Any) -> int | None:
        return self._block.get(one.untyped_storage().data_ptr()) if isinstance(one, torch.Tensor) else None

    def _gone(self, number: int, pointer: int) -> None:
        self._views[number] -= 1
        if not self._views[number]:
            self.blocks[number]["freed"] = self.calls
            self._block.pop(pointer, None)

    def idle(self) -> int:
        """The most bytes that were there at once though nothing read them any more."""
        return max(
            sum(one["bytes"] for one in self.blocks if one["read"] < call <= one.get("freed", self.calls))
            for call in range(self.calls + 1)
        )


def idle_bytes(apart: bool, folder: Path) -> tuple[int, int]:
    """The most that is there at once though nothing reads it any more, and what may be."""
    batch = {"x": torch.ones(TOKENS, WIDTH).cumsum(0) / TOKENS}
    model = Model()
    program = load(csc.compile(model, example=batch, cache=False, check=False).write(folder))
    functions(program, 0)
    rank = importlib.import_module(f"{program.package}.rank_0")
    weights, constants = {name: one.detach() for name, one in model.named_parameters()}, program.constants(0)
    received = {"loss": torch.tensor(1.0)}
    with Lives() as lives:
        kept = [rank.forward(batch, {}, weights, constants)[1]]
        if apart:
            kept.append(rank.backward_input(kept.pop(), received, weights, constants)[1])
            gradients = dict(rank.backward_weight(kept.pop(), weights, constants))
        else:
            gradients = dict(rank.backward(kept.pop(), received, weights, constants))
        idle = lives.idle()
    model(**batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    return idle, sum(one.nbytes for one in gradients.values()) + 2 * TOKENS * WIDTH * 4


def test_what_was_read_for_the_last_time_is_freed(tmp_path: Path) -> None:
    """All but the gradients of parameters, which are handed out, and a value on its way from one region to the next.

    In a process of its own, with nothing in it that other tests have left.
    """
    code = (
        "from pathlib import Path\n"
        "from tests.compiler.test_freed_tensors import idle_bytes\n"
        f"print(*idle_bytes(False, Path({str(tmp_path / 'together')!r})))\n"
        f"print(*idle_bytes(True, Path({str(tmp_path / 'apart')!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [tuple(map(int, line.split())) for line in done.stdout.splitlines()[-2:]]
    assert len(rows) == 2 and all(0 < idle <= most for idle, most in rows), rows
