"""Models that take decisions from values: sizes of images, tokens, masks; each compared with itself in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.reports.verification import verify
from tests.exactness import FLOAT32
from tests.models import hf
from tests.tiers import long

WIDTH, WORDS, IMAGE, SOUND = 8, 40, 39, 38

Batch = dict[str, torch.Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Reader(nn.Module):
    """Patches of all images in one row, pooled image by image, merged into text whose positions depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.embed, self.position = nn.Linear(3, WIDTH), nn.Embedding(WORDS, WIDTH), nn.Embedding(99, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WORDS)

    def positions(self, ids: torch.Tensor, grids: torch.Tensor, times: Iterable[int] | None = None) -> torch.Tensor:
        """An image's tokens count as many positions as the image is wide. What `times` is, its body replaces."""
        times = iter(times if times is not None else [1, 2])
        found = []
        for row in ids.tolist():
            places, at = [], 0
            for word in row:
                places.append(at)
                at += int(grids[0, 1]) * next(times) if word == IMAGE else 1
            found.append(places)
        return torch.tensor(found, device=ids.device)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, patches: torch.Tensor, grids: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.patch(patches)
        images = [part.mean(0) for part in hidden.split(grids.prod(1).tolist())]
        merged = self.embed(ids).masked_scatter((ids == IMAGE)[..., None], torch.stack(images))
        merged = merged + self.position(self.positions(ids, grids))
        for layer in self.layers:
            merged = layer(merged)
        return F.cross_entropy(self.head(merged).flatten(0, 1), labels.flatten())


def reader_batch(grids: list[list[int]], length: int = 7, first: int = 1) -> Batch:
    """One image token a sample, two samples."""
    ids = first + (torch.arange(2)[:, None] * 5 + torch.arange(length)) % 30
    ids[0, 1], ids[1, 3] = IMAGE, IMAGE
    count = sum(h * w for h, w in grids)
    labels = ids.masked_fill(ids == IMAGE, -100)
    patches = torch.sin(torch.arange(count * 3.0)).view(count, 3)
    return {"ids": ids, "labels": labels, "patches": patches, "grids": torch.tensor(grids)}


def equal(compiled: csc.CompiledModel, batch: Batch | None = None) -> None:
    result = verify(compiled, batch)
    assert result.params_missing == () and result.params_unexpected == ()
    assert result.loss_rel == 0 and result.grad_rel_max == 0


class Listener(Reader):
    """A reader whose text may have sounds, which count as many positions as they are long."""

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, patches: torch.Tensor, grids: torch.Tensor,
        audio_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        lengths = None if audio_mask is None else audio_mask.sum(1)
        hidden = self.embed(ids) + self.position(self.placed(ids, grids, lengths))
        hidden = hidden + self.patch(patches).mean()
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def placed(self, ids: torch.Tensor, grids: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """It needs the lengths only where the text has a sound."""
        found = []
        for number, row in enumerate(ids.tolist()):
            places, at = [], 0
            for word in row:
                places.append(at)
                at += int(grids[0, 1]) if word == IMAGE else lengths[number].item() if word == SOUND else 1
            found.append(places)
        return torch.tensor(found, device=ids.device)


def test_what_a_function_is_called_with_may_be_missing_in_other_batches() -> None:
    """Without sounds it is called with batch entries alone, and can run before the step; with sounds it cannot: what is
    called without them says nothing against a batch that has them.
    """
    torch.manual_seed(0)
    silent = reader_batch([[2, 3], [1, 4]])
    loud = {**silent, "ids": silent["ids"].clone(), "audio_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    loud["ids"][:, 5] = SOUND
    compiled = csc.compile(Listener(), mesh="pp=2", example=loud)
    for batch in (silent, loud, silent, loud):
        equal(compiled, batch)
    assert _captures(compiled) == 2


class Resizing(nn.Module):
    """Resizes images to sizes that are known tensors without dimensions, as Video-LLaMA 3 does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(1, 3, 1), nn.Linear(3, 1)

    def forward(self, pixels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        resized = F.interpolate(self.first(pixels), size=(sizes[0] // 2, sizes[1] // 2), mode="bilinear")
        return self.head(resized.flatten(2).transpose(1, 2)).pow(2).mean()


def test_sizes_that_are_tensors() -> None:
    torch.manual_seed(0)
    pixels = torch.arange(2 * 8 * 6.0).view(2, 1, 8, 6) / 10
    batch = {"pixels": pixels, "sizes": torch.tensor([8, 6])}
    equal(csc.compile(Resizing(), mesh="pp=2", example=batch))


class Viewing(nn.Module):
    """Views each image of a row by sizes that are known tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, patches: torch.Tensor, grids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = self.first(patches).split(grids.prod(1).tolist())
        pooled = [image.view(h, w, WIDTH).mean(0) for image, (h, w) in zip(images, grids)]
        return (self.head(torch.cat(pooled)) - labels.float().mean()).pow(2).mean()


def test_views_of_pieces_by_sizes_that_are_tensors() -> None:
    torch.manual_seed(0)
    batch = reader_batch([[2, 3], [1, 4]])
    equal(csc.compile(Viewing(), mesh="pp=2", example={name: batch[name] for name in ("patches", "grids", "labels")}))


class Segmented(nn.Module):
    """Packed patches, each of which is told which image it is of: by numbers as many as there are images."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.image, self.head = nn.Linear(3, WIDTH), nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, patches: torch.Tensor, grids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counts = grids.prod(1)
        images = torch.repeat_interleave(torch.arange(grids.shape[0]), counts)
        first = torch.zeros(len(grids) + 1, dtype=torch.long)
        first[1:] = counts.cumsum(0)
        hidden = self.patch(patches) + self.image(images) / (1 + first[:-1])[images][:, None]
        return F.cross_entropy(self.head(hidden), labels)


def test_numbers_of_images_by_how_many_there_are() -> None:
    """What is made of that number and of known values is known, and decided for these images alone."""
    torch.manual_seed(0)
    model = Segmented()
    eager = copy.deepcopy(model)
    compiled = None
    for grids in ([[2, 3], [4, 2]], [[4, 2], [2, 3]], [[2, 3], [4, 1], [2, 2]], [[7, 2]], [[2, 3], [4, 2]]):
        rows = sum(height * width for height, width in grids)
        batch = {
            "patches": torch.randn(rows, 3),
            "grids": torch.tensor(grids),
            "labels": torch.randint(0, WORDS, (rows,)),
        }
        compiled = compiled or csc.compile(model, example=batch, cache=False, check=False)
        for one in (model, eager):
            one.zero_grad()
        loss = eager(**batch)
        loss.backward()
        torch.testing.assert_close(compiled.train_step(batch), loss.detach(), rtol=1e-6, atol=0)
        for (name, parameter), (_, right) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, right.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.fixture(scope="module")
def reader() -> csc.CompiledModel:
    torch.manual_seed(0)
    return csc.compile(Reader(), mesh="pp=2", example=reader_batch([[2, 3], [1, 4]]))


class Scratch(nn.Module):
    """A number that decides is read from a tensor that was written to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed, self.layer, self.head = how, nn.Embedding(WORDS, WIDTH), Layer(), nn.Linear(WIDTH, WORDS)

    def counts(self, grids: torch.Tensor) -> torch.Tensor:
        found = torch.empty(2, dtype=torch.long) if self.how == "empty" else torch.zeros(2, dtype=torch.long)
        whole = found.view(1, 2)  # the same memory
        if self.how == "in place":
            found += grids[0]
        elif self.how == "view":
            whole[0].copy_(grids[0])
        else:
            found[0], found[1:] = grids[0, 0], grids[0, 1]
        return whole[0] if self.how != "view" else found

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embed(ids)) * int(self.counts(grids)[0])
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("how", ["entry", "empty", "in place", "view"])
@pytest.mark.long_cases("entry", "view", "in place")
def test_a_decision_by_what_was_written_from_a_batch(how: str) -> None:
    torch.manual_seed(0)
    batch = {name: reader_batch([[2, 3], [2, 2]])[name] for name in ("ids", "labels", "grids")}
    compiled = csc.compile(Scratch(how), example=batch, mesh="pp=2", cache=False)
    equal(compiled)
    equal(compiled, batch | {"grids": torch.tensor([[3, 2], [2, 2]])})


def test_sizes_of_images_and_positions(reader: csc.CompiledModel) -> None:
    equal(reader)
    program = reader.program
    assert set(program.guards.values) == {"grids"}
    assert [call.name for call in reader.compiler.guards.host.calls] == ["positions"]
    assert "positions_0" in {item.name for item in program.inputs}


def test_other_tokens_and_lengths_need_no_other_capture(reader: csc.CompiledModel) -> None:
    """The placeholder moves, so positions differ: they are counted again for every batch."""
    before = _captures(reader)
    for batch in (reader_batch([[2, 3], [1, 4]], first=9), reader_batch([[2, 3], [1, 4]], length=11)):
        batch["ids"] = batch["ids"].flip(1)
        batch["labels"] = batch["labels"].flip(1)
        equal(reader, batch)
    assert _captures(reader) == before


@pytest.mark.slow
def test_other_sizes_of_images_are_another_program(reader: csc.CompiledModel) -> None:
    """As many patches as before, in other images."""
    equal(reader, reader_batch([[1, 4], [3, 2]]))
    equal(reader, reader_batch([[2, 2], [2, 2]]))
    equal(reader, reader_batch([[2, 3], [1, 4]]))


def _captures(compiled: csc.CompiledModel) -> int:
    return len(compiled.compiler.captures)


def weighted(model: nn.Module, microbatches: list[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one process: the mean over the labels of all microbatches."""
    model.zero_grad()
    counts = [int((one["labels"] != -100).sum()) for one in microbatches]
    loss = sum(model(**one) * count for one, count in zip(microbatches, counts)) / sum(counts)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [long("pp=2"), "pp=2,dp=2"])
def test_microbatches_of_one_step_differ_in_size(mesh: str) -> None:
    torch.manual_seed(0)
    example = reader_batch([[2, 3], [1, 4]])
    several = [
        example, reader_batch([[2, 3], [1, 4]], length=11), reader_batch([[2, 2], [1, 1]], first=3),
        reader_batch([[2, 3], [1, 4]], first=6),
    ]  # fmt: skip
    count = 4 if "dp" not in mesh else 2
    compiled = csc.compile(Reader(), mesh=mesh, example=[example] * 4, microbatches=count)
    for batch in (several, several[::-1]):
        loss, expected = weighted(compiled.model, batch)
        torch.testing.assert_close(compiled.train_step(batch), loss)
        found = {name: p.grad for name, p in compiled.model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=2e-5, atol=1e-6)
        compiled.zero_grad()


def test_a_batch_that_the_host_function_refuses(reader: csc.CompiledModel) -> None:
    batch = reader_batch([[2, 3], [1, 4]])
    batch["grids"] = torch.zeros(0, 2, dtype=torch.int64)
    with pytest.raises(csc.CscError, match=r"positions refuses the batch"):
        reader.train_step(batch)


@pytest.mark.slow
@pytest.mark.parametrize(("sample", "found"), [(0, "sample 0: 8, sample 1: 9"), long(1, "sample 0: 9, sample 1: 10")])
def test_placeholders_are_counted_before_the_step(sample: int, found: str) -> None:
    """One too few would drop a row of features in silence; one too many ends in a kernel's error on a GPU."""
    compiled = csc.compile(hf.llava(), mesh="pp=2", example=hf.llava_batch(2))
    batch = hf.llava_batch(2)
    batch["input_ids"][sample, 9 if sample == 0 else 10] = 5 if sample == 0 else hf.IMAGE_TOKEN
    with pytest.raises(csc.CscError, match="placeholders for 18 rows") as caught:
        compiled.train_step(batch)
    assert found in caught.value.what and "modeling_llava.py" in caught.value.where
    assert all(p.grad is None for p in compiled.model.parameters())


@pytest.mark.slow
def test_placeholders_for_rows_that_a_mask_selects() -> None:
    torch.manual_seed(0)
    compiled = csc.compile(Selecting("scatter"), example=selecting_batch())
    batch = selecting_batch((4, 3))
    batch["audio_mask"][0, 4] = 1
    with pytest.raises(csc.CscError, match=r"7 placeholders for 8 rows of features \(sample 0: 4, sample 1: 3\)"):
        compiled.train_step(batch)


# selections by masks


SLOW = pytest.mark.slow


class Selecting(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.features = nn.Embedding(WORDS, WIDTH), nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, sound: torch.Tensor, audio_mask: torch.Tensor
    ) -> torch.Tensor:
        features = self.features(sound)
        hidden = self.embed(ids)
        if self.kind == "scatter":
            hidden = hidden.masked_scatter((ids == IMAGE)[..., None], self.layers[0](features[audio_mask.bool()]))
        elif self.kind == "add":
            images = ids == IMAGE
            hidden = hidden.clone()
            hidden[images] = hidden[images] + features.flatten(0, 1)[: 2 * audio_mask.shape[1] - 3]
        elif self.kind == "write":
            hidden = hidden.clone()
            hidden[ids == IMAGE] = self.layers[0](hidden[ids == IMAGE])
        elif self.kind == "fill":
            hidden = hidden.clone()
            hidden[ids == IMAGE] = features.mean((0, 1))
        elif self.kind == "mean":
            hidden = hidden + features[ids[:, :5] < 30].mean(0)
        elif self.kind == "count":
            hidden = hidden * features[ids[:, :5] < 30].shape[0]
        elif self.kind == "deviation":
            hidden = hidden + features[ids[:, :5] < 30].std(0)
        elif self.kind == "more":
            hidden = hidden * (features[ids[:, :5] < 30].shape[0] + 1)
        elif self.kind == "known":
            heard_rows = features[audio_mask.bool()]
            hidden = hidden + heard_rows.mean(0) / heard_rows.shape[0]
        logits = self.head(self.layers[1](hidden))
        if self.kind == "loss":
            kept = ids < 30
            return F.cross_entropy(logits[kept], labels[kept])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def selecting_batch(lengths: tuple[int, int] = (5, 2), length: int = 12) -> Batch:
    """As many placeholders in each sample as it has sound that is audio_mask."""
    ids = (torch.arange(2)[:, None] * 5 + torch.arange(length) * 3) % 36
    audio_mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    for sample, count in enumerate(lengths):
        ids[sample, 1 : 1 + count] = IMAGE
    sound = torch.cos(torch.arange(30.0)).view(2, 5, 3)
    return {"ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "sound": sound, "audio_mask": audio_mask}


@pytest.mark.parametrize(
    "kind", ["write", *(pytest.param(kind, marks=SLOW) for kind in ("scatter", "add", "fill", "loss", "mean", "count"))]
)
def test_selections_by_a_mask(kind: str) -> None:
    torch.manual_seed(0)
    compiled = csc.compile(Selecting(kind), mesh="pp=2", example=selecting_batch())
    close(compiled, selecting_batch())
    before = _captures(compiled)
    if kind != "add":  # whose number of placeholders is that of its features
        close(compiled, selecting_batch((1, 4)))
        close(compiled, selecting_batch((3, 3), length=15))
    assert _captures(compiled) == before


def test_rows_that_a_known_mask_selects() -> None:
    """Their numbers are made before the step, so what mixes them sees no other."""
    torch.manual_seed(0)
    compiled = csc.compile(Selecting("known"), mesh="pp=2", example=selecting_batch())
    close(compiled, selecting_batch())
    close(compiled, selecting_batch((1, 4)))
    close(compiled, selecting_batch((3, 3), length=15))


def close(compiled: csc.CompiledModel, batch: Mapping[str, Any]) -> None:
    """Rows that were not chosen add exact zeros to a sum of gradients, in another order."""
    result = verify(compiled, batch)
    assert result.params_missing == () and result.params_unexpected == ()
    assert result.loss_rel <= FLOAT32 and result.grad_rel_max <= FLOAT32


@pytest.mark.parametrize(("kind", "what"), [("deviation", "works along the tokens|std"), ("more", "number of rows")])
def test_rows_that_were_not_chosen_never_count(kind: str, what: str) -> None:
    with pytest.raises(csc.CscError, match=what) as caught:
        csc.compile(Selecting(kind), mesh="pp=2", example=selecting_batch())
    assert "test_values.py" in caught.value.where


@pytest.mark.slow
def test_one_capture_serves_other_numbers_of_samples() -> None:
    compiled = csc.compile(hf.whisper_llama(), mesh="pp=2", example=hf.whisper_batch(2))
    for samples, length in ((3, 12), (4, 17)):
        result = verify(compiled, hf.whisper_batch(samples, length))
        assert result.params_missing == () and result.grad_rel_max <= FLOAT32
    assert _captures(compiled) == 1
