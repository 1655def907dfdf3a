"""Decisions that a model takes by values of its batch: a capture for each answer, and never one for another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import InputError
from tests import launching
from tests.exactness import FLOAT32
from tests.tiers import long

WORDS, WIDTH = 40, 8
IMAGE, SOUND = 39, 38
Batch = dict[str, torch.Tensor]


class Deciding(nn.Module):
    """Text, and further layers that its tokens ask for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.special = nn.Buffer(torch.tensor([IMAGE, SOUND]))
        self.steps = nn.Buffer(torch.tensor(0))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        hidden = getattr(self, self.kind)(input_ids, hidden, labels)
        hidden = torch.tanh(self.layers[0](hidden))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def any(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Two branches, each taken or not, the second asked for only after the first."""
        if (ids == IMAGE).any():
            hidden = hidden + self.layers[1](hidden)
            if (ids[:, :3] == SOUND).any():
                hidden = hidden * self.layers[2](hidden)
        return hidden

    def item(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A number of the batch as a number of Python."""
        return hidden * (1 + (ids == IMAGE).sum().item())

    def listed(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A list, of which the largest number says how often a layer runs."""
        for _ in range(max((ids == IMAGE).sum(1).tolist())):
            hidden = torch.sin(self.layers[1](hidden))
        return hidden

    def largest(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Which layer it is decides the largest label."""
        return self.layers[1 + labels.max().item() % 2](hidden)

    def rows(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Places of tokens, and how many there are."""
        found = (ids == IMAGE).nonzero(as_tuple=True)
        more = self.layers[1](hidden[found])
        if found[0].shape[0] > 2:
            more = more * 2
        return hidden.index_put(found, more)

    def written(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A mask that is written to through a view before it is asked for."""
        mask = ids == IMAGE
        view = mask[:, 1:]
        view[:, 1:] = False
        view |= (ids == SOUND)[:, 1:]
        return self.layers[1](hidden) if mask[:, 1:].any() else self.layers[2](hidden)

    def spoilt(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A mask that hidden values are written to."""
        mask = ids == IMAGE
        mask.view(-1)[:2] = (hidden > 0)[0, 0, :2]
        return self.layers[1](hidden) if mask.any() else self.layers[2](hidden)

    def hidden(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """By the weights, after a decision by tokens."""
        if (ids == IMAGE).any():
            hidden = hidden * 2
        return self.layers[1](hidden) if hidden.sum() > 0 else self.layers[2](hidden)

    def buffer(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Tokens that a buffer names, and one that stands in the code."""
        if torch.isin(ids, self.special).any() and ids.eq(torch.tensor([1, 2]).max()).any():
            hidden = self.layers[1](hidden)
        return hidden

    def counter(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """By how often it was run."""
        if (ids.sum() * 0 + self.steps > 3).any():
            hidden = self.layers[1](hidden)
        self.steps += 1
        return hidden

    def chance(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """By a random number."""
        return self.layers[1](hidden) if torch.rand_like(ids.float()).mean() > 0.5 else self.layers[2](hidden)

    def sized(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of a length and of tokens at once."""
        if (ids.sum(1) > 20 * ids.shape[1]).all():
            hidden = self.layers[1](hidden)
        return hidden

    def everything(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """All kinds of questions, one after the other."""
        for kind in (self.any, self.item, self.listed, self.largest, self.rows, self.written):
            hidden = torch.tanh(kind(ids, hidden, labels))
        return hidden


def batch(images: tuple[int, ...] = (1, 0), sounds: tuple[int, ...] = (0, 0), length: int = 6, first: int = 0) -> Batch:
    """So many image tokens in each sample, then sounds."""
    ids = 1 + (first + torch.arange(len(images))[:, None] * 5 + torch.arange(length)) % 30
    for sample, (image, sound) in enumerate(zip(images, sounds)):
        ids[sample, 1 + first % 2 :][:image] = IMAGE
        ids[sample, length - sound :] = SOUND
    return {"input_ids": ids, "labels": (ids * 7 + 1) % 30}


def trained(compiled: csc.CompiledModel, given: Batch) -> None:
    """One step, every gradient beside those of eager PyTorch."""
    model = compiled.model
    model.zero_grad()
    compiled.zero_grad()
    loss = model(**given)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.testing.assert_close(compiled.train_step(given), loss.detach(), rtol=FLOAT32, atol=1e-6)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=1e-6, msg=lambda text, name=name: name + text)


def captures(compiled: csc.CompiledModel) -> int:
    return len(compiled.compiler.captures)


def made(kind: str, example: Batch | None = None, mesh: str = "pp=2", cache: bool = False) -> csc.CompiledModel:
    return csc.compile(Deciding(kind), mesh=mesh, example=example or batch(), cache=cache)


def test_another_answer_is_another_capture_and_the_same_one_is_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "csc")
    compiled = made("any")
    numbers = []
    for given in (
        batch(), batch((2, 3), first=4), batch((0, 0), first=2), batch((0, 0), (1, 0)), batch((3, 1), (4, 0)), batch(),
    ):  # fmt: skip
        trained(compiled, given)
        numbers.append(captures(compiled))
    assert numbers == [1, 1, 2, 2, 3, 3]
    assert "bool(any(eq(input_ids, 39))) is False, and was assumed to be True" in caplog.text
    assert compiled.compiler.match(batch()).answers[0] == "bool(any(eq(input_ids, 39))) is True"


def random_batch(seed: int) -> Batch:
    chance = torch.Generator().manual_seed(seed)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=chance))

    images, sounds = (draw(3), draw(3)), (draw(2), draw(4) // 3 * 5)
    return batch(images, sounds, first=draw(9))


@pytest.mark.parametrize(
    "kind",
    [
        "any",
        "item",
        "listed",
        long("largest"),
        "rows",
        "written",
        "buffer",
        "sized",
        long("everything"),
    ],
)
@pytest.mark.long_cases("written", "rows", "listed", "item", "any")
def test_batches_of_all_kinds(kind: str) -> None:
    """Whatever a batch decides, its step is that of eager PyTorch; what was decided before is not traced again."""
    compiled = made(kind)
    several = [random_batch(seed) for seed in range(4)]
    for given in several:
        trained(compiled, given)
    before = captures(compiled)
    for given in several:
        trained(compiled, given)
    assert captures(compiled) == before


def test_what_only_moves_tokens_is_one_capture() -> None:
    """Numbers of places are made before the step; how many there are is a size."""
    compiled = made("rows", batch((2, 2)))
    for given in (batch((1, 2), first=3), batch((2, 2), first=5), batch((3, 1))):
        trained(compiled, given)
    assert captures(compiled) == 1
    assert [one.prefix for one in compiled.compiler.guards.host.calls] == ["nonzero"]


@pytest.mark.parametrize(
    ("kind", "what"), [("spoilt", "mask.any()"), ("hidden", "hidden.sum() > 0"), ("chance", "rand_like")]
)
def test_what_the_batch_alone_does_not_decide_is_refused(kind: str, what: str) -> None:
    with pytest.raises(InputError, match="depends on the values") as caught:
        made(kind).prepare()
    assert "test_decisions.py" in caught.value.where and what in caught.value.where


def test_a_counter_of_steps_decides_nothing() -> None:
    with pytest.raises(csc.CscError, match="steps"):
        made("counter").prepare()


def test_microbatches_and_replicas_that_decide_alike() -> None:
    compiled = csc.compile(
        Deciding("any"), mesh="pp=2,dp=2", example=batch((1,) * 4, (0,) * 4), microbatches=2, cache=False
    )
    for given in (batch((1,) * 4, (0,) * 4), batch((0,) * 4, (0,) * 4), batch((2,) * 4, (0,) * 4)):
        trained(compiled, given)
    assert captures(compiled) == 2


def test_microbatches_of_one_step_that_decide_differently_are_refused() -> None:
    """One of them has a picture: nothing is trained, and the next step is in order."""
    compiled = csc.compile(Deciding("any"), mesh="pp=2", example=batch((1, 1)), microbatches=2, cache=False)
    with pytest.raises(InputError, match=r"decide differently: .*any\(eq\(input_ids, 39\)\)"):
        compiled.train_step(batch((1, 0)))
    assert all(p.grad is None for p in compiled.model.parameters())
    trained(compiled, batch((1, 2)))


class Flagged(nn.Module):
    """Flags, an entry of their own, say whether a layer runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.optional = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        if flags.any():
            hidden = hidden + self.optional(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def flagged(*flags: int, first: int = 0) -> Batch:
    return {**batch((0,) * len(flags), (0,) * len(flags), first=first), "flags": torch.tensor(flags)}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.long_cases("1")
def test_values_of_an_entry_that_leave_a_layer_out(first: int) -> None:
    """Values are no answers, and a capture of others may have other regions: with the layer first, and without it."""
    compiled = csc.compile(Flagged(), mesh="pp=2", example=flagged(first, first), microbatches=2, cache=False)
    for given in (flagged(first, first), flagged(1 - first, 1 - first), flagged(first, first, first=3)):
        trained(compiled, given)
    assert captures(compiled) == 2
    with pytest.raises(InputError, match=r"decide differently: flags is \[[01]\], flags is \[[01]\]"):
        compiled.train_step(flagged(1, 0))
    trained(compiled, flagged(1, 1, first=2))


@pytest.mark.parametrize("first", [0, long(1)])
def test_a_fresh_start_traces_neither_answer_again(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path / "cache"))
    both = [batch(), batch((0, 0))]
    compiled = made("any", cache=True)
    for given in both:
        trained(compiled, given)
    assert captures(compiled) == 2
    again = made("any", both[first], cache=True)
    for given in (*both, batch((0, 0), first=3), batch((1, 1), first=2)):
        trained(again, given)
    assert captures(again) == 0
    trained(again, batch((0, 0), (1, 0)))
    trained(again, batch((2, 0), (4, 0)))  # that nobody decided before
    assert captures(again) == 1


def test_a_directory_asks_no_batch_and_is_not_written(tmp_path: Path) -> None:
    compiled = made("any")
    with pytest.raises(csc.InputError, match="a directory is for one answer"):
        compiled.write(tmp_path / "program")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gloo
def test_two_processes(tmp_path: Path) -> None:
    """What one answer leaves out is left out on its rank; the gradients are those of one process."""
    from tests.compiler import decisions_worker

    launching.ranks(decisions_worker.main, 2, {"kind": "any", "mesh": "pp=2"}, tmp_path)
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(2)]
    assert [one["refused"] for one in results] == ["", ""]
    assert sorted(one["captures"] for one in results) == [0, 3]
    for number, given in enumerate(decisions_worker.BATCHES):
        model = Deciding("any")
        loss = model(**given)
        loss.backward()
        found = load_file(tmp_path / f"gradients_{number}_0.safetensors")
        found |= load_file(tmp_path / f"gradients_{number}_1.safetensors")
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=1e-6)
        assert results[0]["losses"][number] == results[1]["losses"][number] == pytest.approx(float(loss.detach()))


@pytest.mark.gloo
def test_two_processes_refuse_parameters_that_none_had(tmp_path: Path) -> None:
    """Which of two layers it is changes with the batch: the ranks' optimizers do not have the other."""
    from tests.compiler import decisions_worker

    launching.ranks(decisions_worker.main, 2, {"kind": "written", "mesh": "pp=2"}, tmp_path)
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(2)]
    assert all("did not have before" in one["refused"] for one in results)
