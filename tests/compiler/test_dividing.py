"""Samples are divided with what belongs to them: batches as loaders make them, against eager PyTorch on the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

import csc
from csc.errors import InputError
from csc.integrations.hf import CompiledTrainer
from tests.exactness import FLOAT32
from tests.models import captions, mixed
from tests.tiers import BEFORE_2_13, long

pytestmark = pytest.mark.usefixtures("traces")

FLOAT64 = 1e-12
Batch = dict[str, Any]


def eager(model: nn.Module, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients; `.grad` is None afterwards."""
    loss = model(**batch)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), gradients


def step_is_eager(compiled: csc.CompiledModel, batch: Batch, limit: float, given: Any = None) -> None:
    """A step on the batch, or on microbatches that are `given` for it, has eager's loss and gradients on the whole."""
    model = compiled.model
    model.zero_grad()
    loss, expected = eager(model, batch)
    found = compiled.train_step(batch if given is None else given)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    assert float(found) == pytest.approx(loss, rel=limit)
    largest: dict[str, float] = {}
    for name, gradient in expected.items():
        part = name.split(".layers")[0]
        largest[part] = max(largest.get(part, 0.0), float(gradient.norm()))
    for name, gradient in expected.items():
        scale = max(float(gradient.norm()), 1e-2 * largest[name.split(".layers")[0]])
        assert float((gradients[name] - gradient).norm()) <= limit * scale, name


def same(model: nn.Module, batch: Batch, limit: float, given: Any = None, **options: Any) -> csc.CompiledModel:
    compiled = csc.compile(model, example=batch if given is None else given, **options)
    step_is_eager(compiled, batch, limit, given)
    return compiled


# models of Hugging Face


@pytest.mark.slow
@pytest.mark.parametrize("name", [long("LLaVA-NeXT"), long("SmolVLM"), "Qwen2.5-VL", long("Qwen2-Audio")])
def test_images_of_different_size_and_number(name: str) -> None:
    same(*mixed.built(name, [2, 0, 1, 1]), FLOAT32, mesh="pp=2", microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "microbatches"), [long("pp=2", 4), ("dp=2", 2), long("pp=2,dp=2", 1)])
def test_meshes(mesh: str, microbatches: int) -> None:
    same(*mixed.built("Qwen2-VL", [1, 3, 2, 1]), FLOAT32, mesh=mesh, microbatches=microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LLaVA", long("Gemma 3"), long("SmolVLM"), long("Qwen3-VL"), long("Qwen2-Audio")])
def test_a_microbatch_without_images(name: str) -> None:
    same(*mixed.built(name, [2, 1, 0, 0]), FLOAT32, mesh="pp=2", microbatches=2)


# a model in float64


@pytest.mark.parametrize(
    "options", [{"microbatches": 2}, long({"microbatches": 4}), {"mesh": "dp=2", "microbatches": 2}]
)
@pytest.mark.long_cases("options2")
def test_images_belong_to_their_samples(options: dict[str, Any]) -> None:
    batch = captions.batch([[1, 2], [1], [3], [2, 1, 1]])
    same(captions.Captions(), batch, FLOAT64, **{"mesh": "pp=2", **options})


@pytest.mark.parametrize(
    ("mesh", "microbatches", "tied"),
    [long("pp=1", 2, False), ("pp=3", 2, True), long("pp=3", 4, False), ("dp=2", 1, False), long("dp=2,pp=2", 2, True)],
)
@pytest.mark.long_cases("pp=3-2-True")
def test_microbatches_and_replicas_without_images(mesh: str, microbatches: int, tied: bool) -> None:
    """Those that have some come first, or last; then nobody has one, and the encoder has no gradient."""
    model = captions.Captions(tied)
    compiled = same(model, captions.batch([[1, 2], [3], [], []]), FLOAT64, mesh=mesh, microbatches=microbatches)
    step_is_eager(compiled, captions.batch([[], [], [2], [1, 1]]), FLOAT64)
    step_is_eager(compiled, captions.batch([[], [], [], []]), FLOAT64)
    assert all(p.grad is None for p in model.vision.parameters())
    step_is_eager(compiled, captions.batch([[1], [2], [2], [1]]), FLOAT64)


@pytest.mark.parametrize("schedule", [long("gpipe"), "1f1b", "zb-h1", long("interleaved-1f1b"), "zb-v"])
@pytest.mark.long_cases("zb-v", "1f1b")
def test_schedules_keep_in_step(schedule: str) -> None:
    batch = captions.batch([[1], [], [2], [], [], [3], [], [1]])
    same(captions.Captions(), batch, FLOAT64, mesh="pp=2", microbatches=8, schedule=schedule)


@pytest.mark.parametrize(
    "freeze", [["vision.*"], ["embed.*", "layers.*", "head.*"], ["vision.layers.0.*", "layers.1.*"]]
)
@pytest.mark.long_cases("freeze2", "freeze1")
def test_frozen_parts(freeze: list[str]) -> None:
    """With a frozen language model a text alone has nothing to train."""
    batch = captions.batch([[1], [2, 1], [], []])
    model = captions.Captions()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(one.rstrip("*")) for one in freeze))
    same(model, batch, FLOAT64, mesh="pp=3", microbatches=2)


def test_options_that_name_what_a_text_has_not() -> None:
    batch = captions.batch([[1], [2, 1], [], []])
    same(captions.Captions(), batch, FLOAT64, mesh="pp=2", microbatches=2, recompute={"vision*": "full"})


@pytest.mark.parametrize("mesh", [long("pp=3"), long("pp=2,dp=2"), "pp=2"])
def test_two_kinds_come_and_go(mesh: str) -> None:
    """No microbatch has both."""
    compiled = same(captions.Captions(), captions.batch([[1], [2], [], []], [0, 0, 1, 2]), FLOAT64, mesh=mesh,
                    microbatches=2)  # fmt: skip
    step_is_eager(compiled, captions.batch([[], [], [3], [1]], [1, 1, 0, 1]), FLOAT64)
    step_is_eager(compiled, captions.batch([[], [1], [], []]), FLOAT64)
    step_is_eager(compiled, captions.batch([[], [], [], []]), FLOAT64)


EARLY = ["vision.row", "vision.layers.0"]
STAGES = [  # of both, one that takes images into the text; in the second one text alone has no way past the sounds
    [EARLY, ["vision.layers.1", "vision.mean"], ["embed", "merge", "audio.row"], ["audio.layers.*", "audio.mean"],
     ["merge#2", "layers.0", "add"], ["layers.1", "head"]],
    [EARLY, ["vision.layers.1", "vision.mean", "embed", "merge"], ["audio.row", "audio.layers.0"],
     ["audio.layers.1", "audio.mean", "merge#2"], ["layers.0", "add"], ["layers.1", "head"]],
]  # fmt: skip


@pytest.mark.long
def test_text_goes_on_by_way_of_what_is_left_out() -> None:
    """Two places take features into the text, on different stages: one alone takes over the other's way."""
    batch = captions.batch([[1, 2], [3], [], [1]], [0, 3, 2, 0])
    for number, stages in enumerate(STAGES):
        options: dict[str, Any] = {"mesh": "pp=2", "microbatches": 4, "schedule": "interleaved-1f1b"}
        compiled = same(captions.Captions(), batch, FLOAT64, stages=stages, **options)
        text = captions.batch([[1], [], [2], []])
        if not number:
            step_is_eager(compiled, text, FLOAT64)
            continue
        with pytest.raises(csc.InputError, match="needs other messages between the stages than one that has them all"):
            compiled.train_step(text)
        step_is_eager(compiled, captions.batch([[1], [2], [3], [1]], [0, 0, 1, 1]), FLOAT64)


def test_the_first_batch_may_have_no_images() -> None:
    compiled = csc.compile(captions.Captions(), example=captions.batch([[1], [2]]), mesh="pp=2", microbatches=2)
    step_is_eager(compiled, captions.batch([[], []]), FLOAT64)
    step_is_eager(compiled, captions.batch([[3], []]), FLOAT64)
    with pytest.raises(InputError, match="the batch has no entry 'image_grid_thw'"):
        compiled.train_step({name: t for name, t in captions.batch([[3], [1]]).items() if name != "image_grid_thw"})
    forgotten = {name: t for name, t in captions.batch([[3], [1]]).items() if name in ("input_ids", "labels")}
    with pytest.raises(InputError, match="the batch has no entry 'image_grid_thw', and the text has 4 placeholders"):
        compiled.train_step(forgotten)
    with pytest.raises(InputError, match="the batch has no entry 'labels'"):
        compiled.train_step({name: t for name, t in captions.batch([[], []]).items() if name != "labels"})


def test_a_list_of_microbatches_with_and_without_images() -> None:
    batch = captions.batch([[], [2], []])
    images = {"pixel_values", "image_grid_thw"}
    given = [
        {name: t[i : i + 1] for name, t in batch.items() if name not in images}
        | ({name: batch[name] for name in images} if i == 1 else {})
        for i in range(3)
    ]
    same(captions.Captions(), batch, FLOAT64, given, mesh="pp=2", microbatches=3)


def test_a_timeline_leaves_out_what_is_not_done() -> None:
    batch = captions.batch([[1], []])
    compiled = csc.compile(captions.Captions(), example=batch, mesh="pp=2", microbatches=2, cuts=["embed"])
    found = compiled.timeline(batch)
    done = [{str(event.action) for event in rank if event.action.microbatch == 1} for rank in found.ranks]
    assert done[0] == {"F 0 1"} and "SEND B 1>0 1" not in done[1]
    assert "SEND F 0>1 0" in map(str, (event.action for event in found.ranks[0]))


@pytest.mark.long
def test_a_loop_of_hf_trainer(tmp_path: Path) -> None:
    """Batches with other numbers of images, with none, and with an image in the last sample alone."""
    counts = [[1, 2], [3], [], [1], [], [], [], [], [], [], [], [2], [1], [], [2], []]
    steps = [captions.batch(counts[start : start + 4]) for start in range(0, 16, 4)]
    model = captions.Captions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in steps:
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    compiled = csc.compile(captions.Captions(), example=steps[0], mesh="pp=2", microbatches=2)
    settings = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.1, max_grad_norm=0.0,
        lr_scheduler_type="constant", optim="sgd", report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True, train_sampling_strategy="sequential", dataloader_pin_memory=False,
        remove_unused_columns=False,
    )  # fmt: skip
    rows = [{"row": row} for row in range(16)]
    CompiledTrainer(compiled, settings, train_dataset=rows, data_collator=lambda own: steps[own[0]["row"] // 4]).train()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(compiled.model.get_parameter(name), parameter, rtol=1e-11, atol=1e-13, msg=name)


# what a user says


class Chunks(nn.Module):
    """Rows of which nothing says whose they are: as many as each sample's first token. Each counts the scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row, self.embed, self.head = nn.Linear(3, 8), nn.Embedding(30, 8), nn.Linear(8, 30)
        self.double()

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, chunks: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.embed(input_ids)
        hidden = hidden.masked_scatter((input_ids == 29)[..., None], self.row(chunks))
        if scale is not None:
            hidden = hidden * scale.mean()
        return nn.functional.cross_entropy(self.head(hidden.tanh()).flatten(0, 1), labels.flatten())


def chunks_batch(counts: list[int]) -> Batch:
    ids = torch.arange(len(counts) * 6).view(len(counts), 6) % 20
    for sample, count in enumerate(counts):
        ids[sample, 1 : 1 + count] = 29
    rows = torch.sin(torch.arange(sum(counts) * 3.0)).view(-1, 3).double()
    return {"input_ids": ids, "labels": ids.roll(1, 1), "chunks": rows}


def places(batch: Batch) -> torch.Tensor:
    return (batch["input_ids"] == 29).sum(1)


def test_whose_rows_are_whose_can_be_said() -> None:
    batch = chunks_batch([1, 2, 1, 3])
    with pytest.raises(InputError, match=r"'chunks' has 7 rows; .*divide=\{'chunks': \.\.\.\}"):
        csc.compile(Chunks(), example=batch, microbatches=2)
    compiled = same(Chunks(), batch, FLOAT64, microbatches=2, divide={"chunks": places})
    step_is_eager(compiled, chunks_batch([3, 1, 2, 2]), FLOAT64)
    other = compiled.with_options(microbatches=4)
    step_is_eager(other, chunks_batch([2, 1, 1, 2]), FLOAT64)


def test_entries_can_be_said_to_be_whole_or_samples() -> None:
    batch = {**chunks_batch([1, 1, 1, 1]), "scale": torch.linspace(1, 2, 4).double()}
    same(Chunks(), batch, FLOAT64, microbatches=2, divide={"chunks": "samples", "scale": "whole"})


class Places(nn.Module):
    """Positions of three axes, (3, samples, length), as M-RoPE has them, and tables of (2, samples, 8)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 30)
        self.double()

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor,
        tables: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        angles = (position_ids[..., None].double() * torch.arange(1, 9)).cos()
        hidden = self.mix(self.embed(input_ids)) * angles[0] + angles[1] * angles[2]
        if tables is not None:
            hidden = hidden * tables[0][:, None] + tables[1][:, None]
        return nn.functional.cross_entropy(self.head(hidden.tanh()).flatten(0, 1), labels.flatten())


def places_batch(samples: int, length: int = 5) -> Batch:
    ids = torch.arange(samples * length).view(samples, length) % 29
    positions = (torch.arange(3 * samples * length) * 7 % 11).view(3, samples, length)
    return {"input_ids": ids, "labels": ids.roll(1, 1), "position_ids": positions}


@pytest.mark.parametrize(("samples", "microbatches"), [(3, 3), (3, 1), (4, 2), (6, 2)])
@pytest.mark.long_cases("3-3", "4-2", "3-1")
def test_positions_of_several_axes(samples: int, microbatches: int) -> None:
    """The samples of one of them lie along its second dimension, also where there are as many as axes."""
    compiled = same(Places(), places_batch(samples), FLOAT64, microbatches=microbatches, mesh="pp=2")
    step_is_eager(compiled, places_batch(samples, 7), FLOAT64)


@pytest.mark.parametrize(("samples", "microbatches"), [(2, 2), (4, 2)])
@pytest.mark.long_cases("2-2")
def test_the_dimension_of_samples_can_be_said(samples: int, microbatches: int) -> None:
    batch = {**places_batch(samples), "tables": torch.sin(torch.arange(samples * 16.0)).view(2, samples, 8).double()}
    same(Places(), batch, FLOAT64, microbatches=microbatches, mesh="pp=2", divide={"tables": 1, "position_ids": 1})


class OwnPlaces(nn.Module):
    """Positions of three kinds for each sample, (samples, 3, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 9)
        self.double()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids) + self.places(position_ids).mean(1)
        return nn.functional.cross_entropy(self.head(torch.tanh(x)).flatten(0, 1), labels.flatten())


@pytest.mark.skipif(BEFORE_2_13, reason="torch itself names the two lengths")
def test_three_samples_with_positions_of_three_kinds_each() -> None:
    """The sizes do not tell which dimension is which: an error that names what does."""
    ids = torch.randint(0, 9, (6, 5))
    batch = {"input_ids": ids, "position_ids": torch.randint(0, 9, (6, 3, 5)), "labels": ids.roll(1, 1)}
    same(OwnPlaces(), batch, FLOAT64, microbatches=2, mesh="pp=1", divide={"position_ids": 0})
    three = {name: tensor[:3] for name, tensor in batch.items()}
    with pytest.raises(InputError, match=r"divide=\{'position_ids': 0\}"):
        csc.compile(OwnPlaces(), example=three, microbatches=3, cache=False).train_step(three)


def test_a_function_divides() -> None:
    batch = chunks_batch([1, 2, 1, 3])

    def divide(batch: Batch, parts: int) -> list[Batch]:
        each = len(batch["input_ids"]) // parts
        rows = batch["chunks"].split([sum(own) for own in zip(*[iter(places(batch).tolist())] * each)])
        own = {name: batch[name].split(each) for name in ("input_ids", "labels")}
        return [{"chunks": rows[i], **{name: pieces[i] for name, pieces in own.items()}} for i in range(parts)]

    same(Chunks(), batch, FLOAT64, microbatches=2, divide=divide)


@pytest.mark.parametrize(
    ("divide", "message"),
    [
        ({"chunks": "images"}, "divide has 'images' for 'chunks'"),
        (
            {"chunks": lambda batch: [3, 4]},
            r"divide says \[3, 4\] of the batch entry 'chunks', which has 7 rows, for 4",
        ),
        ({"chunks": lambda batch: [3, 3, 1, 1]}, "which has 7 rows, for 4 samples"),
        ({"chunks": lambda batch: 7}, "divide says 7 of"),
        ({"chunks": "samples"}, r"divide says \[1, 1, 1, 1\] of the batch entry 'chunks'"),
        (lambda batch, parts: [batch], "divide was asked for 2 microbatches and gave 1"),
        (lambda batch, parts: None, "gave a NoneType"),
        ({"chunks": 1}, r"samples of 'chunks' lie along its dimension 1, and it is \[7, 3\], for 4 samples"),
        ({"chunk": "samples"}, "how 'chunk' is divided, which is no entry of the batch.*did you mean 'chunks'"),
        (3, "divide is 3"),
    ],
)
@pytest.mark.long_cases("3-divide is 3")
def test_what_is_said_wrongly(divide: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        csc.compile(Chunks(), example=chunks_batch([1, 2, 1, 3]), microbatches=2, divide=divide)
