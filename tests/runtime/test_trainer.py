"""Training in one process: the loss and every gradient are those of eager autograd."""

from __future__ import annotations

import weakref
from collections import Counter, UserDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import handmade
import pytest
import torch
from torch import nn

from csc.errors import CscError, InputError
from csc.ir.schedule import Action
from csc.planning.schedules import SCHEDULES
from csc.runtime import trainer as trainer_module
from csc.runtime.loaded_program import load
from csc.runtime.loss import Losses
from csc.runtime.parameters import _is_free, receive, taken
from csc.runtime.trainer import Trainer
from csc.torch_private.traces import TorchDispatchMode
from tests.planning.in_flight import peak_in_flight

ONE, THREE, V = (0, 0, 0), (0, 1, 2), (0, 1, 0)


def make(path: Path, **options: Any) -> Trainer:
    return Trainer(load(handmade.write(path / "program", **options)))


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in trainer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("placement", "dp"),
    [(ONE, 1), (ONE, 2), (THREE, 1), (THREE, 2), (THREE, 3), (V, 1), (V, 2), ((0, 0, 1), 1), ((1, 0, 1), 1)],
)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_are_eager(
    tmp_path: Path, placement: tuple[int, ...], dp: int, microbatches: int, schedule: str
) -> None:
    trainer = make(tmp_path, placement=placement, dp=dp, microbatches=microbatches, schedule=schedule, dtype="float64")
    batch = handmade.batch(microbatches * dp)
    loss, expected = handmade.eager(handmade.weights(torch.float64), batch)
    found = trainer.train_step(batch)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    assert gradients(trainer).keys() == expected.keys()
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", ["prefix", "middle", "all"])
def test_frozen_parameters_get_nothing(tmp_path: Path, frozen: str) -> None:
    trainer = make(tmp_path, frozen=frozen, dp=2)
    batch = handmade.batch(8)
    loss, expected = handmade.eager(handmade.weights(), batch)
    torch.testing.assert_close(trainer.train_step(batch), loss)
    names = {n for n in expected if n not in handmade.FROZEN[frozen]}
    assert gradients(trainer).keys() == names == {n for n, _ in trainer.named_parameters()}
    for name in names:
        torch.testing.assert_close(gradients(trainer)[name], expected[name])
    assert set(trainer.state_dict()) == set(handmade.SHAPES)


@pytest.mark.parametrize("frozen", ["none", "prefix"])
def test_all_schedules_give_the_same_bits(tmp_path: Path, frozen: str) -> None:
    batch = handmade.batch(12)
    results = {}
    cases = [(name, THREE) for name in SCHEDULES if name != "zb-v"] + [("auto", V)]  # zb-v wants two stages a rank
    for name, placement in cases:
        home = tmp_path / f"{name}{placement}"
        trainer = make(home, schedule=name, placement=placement, dp=2, microbatches=6, frozen=frozen)
        results[name, placement] = (trainer.train_step(batch), gradients(trainer))
    loss, expected = results["gpipe", THREE]
    for name, (found, sums) in results.items():
        assert torch.equal(found, loss), name
        assert sums.keys() == expected.keys()
        for parameter, gradient in sums.items():
            assert torch.equal(gradient, expected[parameter]), (name, parameter)


def test_the_order_of_microbatches_does_not_change_a_bit(tmp_path: Path) -> None:
    batch = handmade.batch(4)
    usual = make(tmp_path / "usual", placement=ONE)
    text = "rank 0: " + " | ".join(f"{kind} {s} {mb}" for kind in "F" for mb in (2, 0, 3, 1) for s in (0, 1, 2))
    text += " | " + " | ".join(f"B {s} {mb}" for mb in (1, 3, 2, 0) for s in (2, 1, 0))
    text += " | " + " | ".join(f"W {s} {mb}" for s in (1, 0, 2) for mb in (3, 1, 0, 2)) + " | REDUCE"
    odd = make(tmp_path / "odd", placement=ONE, text=text)
    assert torch.equal(usual.train_step(batch), odd.train_step(batch))
    for name, gradient in gradients(odd).items():
        assert torch.equal(gradient, gradients(usual)[name]), name


def test_one_microbatch_is_eager_to_the_bit_in_the_loss(tmp_path: Path) -> None:
    trainer = make(tmp_path, microbatches=1)
    loss = trainer.train_step(handmade.batch(1))
    rank = trainer.ranks[2]
    data = handmade.batch(1)
    first, _ = trainer.ranks[0].functions[0].forward(data, {}, trainer.state_dict(), {})
    second, _ = trainer.ranks[1].functions[1].forward(data, first, trainer.state_dict(), {})
    sent, _ = rank.functions[2].forward(data, first | second, trainer.state_dict(), rank.constants)
    assert torch.equal(loss, sent["loss"])


@pytest.mark.parametrize("weight", ["sum", "mean"])
def test_other_loss_weights(tmp_path: Path, weight: str) -> None:
    trainer = make(tmp_path, weight=weight, dp=2, microbatches=3)
    batch = handmade.batch(6)
    if weight == "sum":
        loss, expected = handmade.eager(handmade.weights(), batch, "sum")
    else:
        parts = [
            handmade.eager(handmade.weights(), {k: v[2 * i : 2 * i + 2] for k, v in batch.items()}) for i in range(6)
        ]
        loss = torch.stack([part[0] for part in parts]).mean()
        expected = {n: torch.stack([p[1][n] for p in parts]).mean(0) for n in handmade.SHAPES}
    torch.testing.assert_close(trainer.train_step(batch), loss)
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, expected[name])


def test_microbatch_without_labels_counts_nothing(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    batch = handmade.batch(4)
    batch["labels"][2:4] = -100  # all of microbatch 1
    loss, expected = handmade.eager(handmade.weights(), batch)
    torch.testing.assert_close(trainer.train_step(batch), loss)
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, expected[name])


def test_gradients_add_up_until_zero_grad(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    batch = handmade.batch(4)
    trainer.train_step(batch)
    once = {n: g.clone() for n, g in gradients(trainer).items()}
    trainer.train_step(batch)
    assert all(torch.equal(g, 2 * once[n]) for n, g in gradients(trainer).items())
    trainer.zero_grad()
    assert not gradients(trainer)
    trainer.train_step(batch)
    assert all(torch.equal(g, once[n]) for n, g in gradients(trainer).items())


def test_ready_microbatches_and_user_dicts(tmp_path: Path) -> None:
    trainer = make(tmp_path, dp=2, microbatches=2)
    batch = handmade.batch(4)
    pieces = [{k: v[2 * i : 2 * i + 2] for k, v in batch.items()} for i in range(4)]
    losses = [trainer.train_step(form) for form in (batch, pieces, UserDict(batch), {**batch, "mask": None})]
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_optimizer_trains(tmp_path: Path) -> None:
    trainer = make(tmp_path, dp=2)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.05)
    batch = handmade.batch(8)
    losses = []
    for _ in range(20):
        trainer.zero_grad()
        losses.append(float(trainer.train_step(batch)))
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_parameters_are_the_callers_own(tmp_path: Path) -> None:
    own = {n: nn.Parameter(w) for n, w in handmade.weights().items()}
    trainer = Trainer(load(handmade.write(tmp_path / "p")), own)
    assert all(p is own[n] for n, p in trainer.named_parameters())
    before = trainer.train_step(handmade.batch(4))
    own["w0"].data = torch.zeros_like(own["w0"])
    assert trainer.train_step(handmade.batch(4)) != before


def test_clip_is_torchs(tmp_path: Path) -> None:
    trainer = make(tmp_path, dp=2)
    batch = handmade.batch(8)
    trainer.train_step(batch)
    other = [nn.Parameter(p.detach().clone()) for p in trainer.parameters()]
    for mine, theirs in zip(trainer.parameters(), other, strict=True):
        assert mine.grad is not None
        theirs.grad = mine.grad.clone()
    expected = nn.utils.clip_grad_norm_(other, 0.01)
    torch.testing.assert_close(trainer.clip_grad_norm_(0.01), expected)
    for mine, theirs in zip(trainer.parameters(), other, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_loss_that_is_not_finite_names_the_microbatch(tmp_path: Path) -> None:
    trainer = make(tmp_path, dp=2, microbatches=2, weight="mean")
    batch = handmade.batch(4)
    trainer.train_step(batch)
    before = {n: g.clone() for n, g in gradients(trainer).items()}
    batch["labels"][4:6] = -100
    with pytest.raises(CscError, match=r"microbatch 0 of replica 1 is not finite.*No gradient was touched"):
        trainer.train_step(batch)
    assert all(torch.equal(g, before[n]) for n, g in gradients(trainer).items())


def test_no_labels_at_all(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    batch = handmade.batch(4)
    batch["labels"][:] = -100
    with pytest.raises(CscError, match="microbatch 0, 1, 2, 3 is not finite \\(nan\\)"):
        trainer.train_step(batch)


def test_timeline(tmp_path: Path) -> None:
    trainer = Trainer(load(handmade.write(tmp_path / "p")), trace=True)
    trainer.train_step(handmade.batch(4))
    for stage, actions in enumerate(trainer.program.schedule.ranks):
        assert tuple(t.action for t in trainer.timeline[stage]) == actions
        assert all(t.start <= t.end for t in trainer.timeline[stage])


def test_an_error_in_a_rank_file_says_where(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p")
    file = directory / "layers/stage_1.py"
    file.write_text(file.read_text().replace("dx = received", "dx = reecived"))
    program = load(directory)
    assert program.edited == ("layers/stage_1.py",)
    with pytest.raises(NameError) as caught:
        Trainer(program).train_step(handmade.batch(4))
    assert caught.value.__notes__ == [f"in rank 1 at '{Action('BW', 1, 0)}'"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"ids": None}, "key 'ids' is missing: expected int64[2, 5] for each microbatch"),
        (
            {"id": torch.zeros(8, 5)},
            "key 'id' is not an input of the program; inputs: ids, labels. Did you mean 'ids'?",
        ),
        ({"use_cache": False}, "key 'use_cache' is not an input"),
        ({"ids": [1]}, "key 'ids': expected a tensor, found list"),
        ({"ids": torch.zeros(8, 5)}, "key 'ids': expected dtype int64, found float32"),
        ({"ids": torch.zeros(8, 6, dtype=torch.int64)}, "key 'ids': expected shape [2, 5], found [2, 6]"),
        ({"ids": torch.zeros(7, 5, dtype=torch.int64)}, "key 'ids': dim 0 is 7"),
        ({"ids": torch.tensor(1)}, "key 'ids' has no dimension to split"),
    ],
)
def test_batches_that_do_not_fit(tmp_path: Path, change: dict[str, object], part: str) -> None:
    trainer = make(tmp_path)
    with pytest.raises(InputError) as caught:
        trainer.train_step({**handmade.batch(4), **change})
    assert part in str(caught.value)


def test_other_input_errors(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(InputError, match="list of 3 microbatches, the program takes 4"):
        trainer.train_step([handmade.batch(1)] * 3)
    with pytest.raises(InputError, match="the batch is a int"):
        trainer.train_step(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Compile with microbatches=2"):
        trainer.train_step(handmade.batch(4), microbatches=2)


def test_saved_activations_live_as_long_as_the_schedule_says(tmp_path: Path) -> None:
    trainer = make(tmp_path, microbatches=6)
    for rank in trainer.ranks:
        alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        peak = [0]
        own = rank.functions[rank.position]
        marked = replace(own, forward=_mark(own.forward, alive, peak), backward=_unmark(own.backward))
        rank.functions[rank.position] = marked  # type: ignore[index]
        trainer.train_step(handmade.batch(6))
        assert peak[0] == peak_in_flight(trainer.program.schedule)[rank.rank]
        assert not alive


def _mark(forward: Callable[..., Any], alive: weakref.WeakSet[torch.Tensor], peak: list[int]) -> Callable[..., Any]:
    def marked(*args: Any) -> Any:
        sent, saved = forward(*args)
        marker = torch.zeros(1)
        alive.add(marker)
        peak[0] = max(peak[0], len(alive))
        return sent, (saved, marker)

    return marked


def _unmark(backward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda saved, *rest: backward(saved[0], *rest)


def test_a_gradient_that_is_its_own_is_not_copied() -> None:
    """Copies of all gradients cost a step's time and memory; shared memory would be written to twice."""

    own, transposed, part = torch.ones(4, 4), torch.eye(4).t(), torch.ones(8)[:4]
    assert _is_free(own, Counter([own.untyped_storage().data_ptr()]))
    assert not _is_free(transposed, Counter()), "laid out otherwise"
    assert not _is_free(part, Counter()), "more memory than it needs"
    assert not _is_free(own, Counter([own.untyped_storage().data_ptr()] * 2)), "another gradient's memory"


def test_a_rank_that_is_alone_waits_for_its_loss_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number asked for before lets a device wait for the host; and of a loss that is none no gradient is touched."""
    trainer, batch = make(tmp_path, placement=ONE, microbatches=2), handmade.batch(2)
    seen: list[str] = []
    real = Losses.total

    def total(losses: Losses, microbatches: int) -> torch.Tensor:
        seen.append("loss")
        assert all(isinstance(loss, torch.Tensor) for loss, _ in losses.parts)
        return real(losses, microbatches)

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default):
                seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    monkeypatch.setattr(Losses, "total", total)
    monkeypatch.setattr(trainer_module, "taken", lambda *given: seen.append("taken") or taken(*given))
    monkeypatch.setattr(trainer_module, "receive", lambda *given: seen.append("received") or receive(*given))
    with Asked():
        trainer.train_step(batch)
    assert seen[seen.index("taken") :][:2] == ["taken", "loss"] and "received" in seen
    before = {name: gradient.clone() for name, gradient in gradients(trainer).items()}
    with torch.no_grad():
        next(iter(trainer.parameters())).fill_(float("nan"))
    with pytest.raises(CscError, match="not finite"):
        trainer.train_step(batch)
    for name, gradient in gradients(trainer).items():
        assert torch.equal(gradient, before[name])


def test_a_gradient_that_is_kept_elsewhere_is_copied(tmp_path: Path) -> None:
    """By a function of a model's own, say: what it keeps is not written to by the next step's sum."""
    trainer, batch = make(tmp_path, schedule="zb-h1", microbatches=1), handmade.batch(1)
    kept: list[torch.Tensor] = []
    rank = next(one for one in trainer.ranks if 1 in one.functions)
    plain = rank.functions[1].backward_weight
    assert plain is not None

    def keeping(*given: Any) -> Any:
        for name, gradient in plain(*given):
            kept.append(gradient)
            yield name, gradient

    for one in trainer.ranks:
        if 1 in one.functions:
            one.functions[1] = replace(one.functions[1], backward_weight=keeping, backward=None)  # type: ignore[index]
    trainer.train_step(batch)
    assert kept
    held = {tensor.untyped_storage().data_ptr() for tensor in kept}
    assert not held & {grad.untyped_storage().data_ptr() for grad in gradients(trainer).values()}
