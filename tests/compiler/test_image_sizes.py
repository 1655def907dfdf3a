"""Images of other sizes and numbers than the example's: one capture, the gradients of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from csc.passes.differentiate import joint_of
from torch import nn
from torch.nn import functional as F

import csc
from csc.capture.trace import export
from csc.ir.printer import program_text
from csc.reports.verification import verify
from tests.compiler.conftest import Models
from tests.compiler.test_parity import capture_no_more
from tests.exactness import FLOAT32
from tests.models import hf

WIDTH, WORDS, IMAGE = 8, 40, 39

Batch = dict[str, torch.Tensor]


def captures(compiled: csc.CompiledModel) -> int:
    return len(compiled.compiler.captures)


def close(compiled: csc.CompiledModel, batch: Batch, largest: float = 0.0) -> None:
    result = verify(compiled, batch)
    assert result.params_missing == () and result.params_unexpected == ()
    assert result.loss_rel <= largest and result.grad_rel_max <= largest


def test_what_has_the_same_size_in_another_size_of_the_batch_is_differentiated_once(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counting(template: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(template.name)
        return joint_of(template, *args, **kwargs)

    monkeypatch.setattr("csc.passes.differentiate.joint_of", counting)
    alone, again = models("llava"), csc.compile(hf.llava(), example=hf.llava_batch(2), cache=False)
    tower = {region.template for region in again.program.regions if region.component == "vision_tower"}
    assert tower <= set(asked)
    for batch in (hf.llava_batch(2, 25), hf.llava_batch(2), hf.llava_batch(2, 25)):
        asked.clear()
        found = again.inspected.divided(batch)
    assert not asked and tower <= {region.template for region in found.regions}
    wider = hf.llava_batch(2, 33)
    found = again.inspected.divided(wider)
    assert asked and not tower & set(asked)
    assert program_text(found) == program_text(alone.inspected.divided(wider))


# Hugging Face models


def test_what_attention_over_packed_rows_cannot_do_is_said() -> None:
    tokens = torch.zeros(1, 2, 6, 8)
    ends = torch.tensor([0, 2, 6])
    out, _ = export._attention(nn.Identity(), tokens, tokens, tokens, None, cu_seq_lens_q=ends)
    assert out.shape == (1, 6, 2, 8)
    with pytest.raises(csc.CscError, match="packed rows with sliding_window"):
        export._attention(nn.Identity(), tokens, tokens, tokens, None, cu_seq_lens_q=ends, sliding_window=4)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_packed_rows_is_that_of_each_sequence(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 12, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    out, _ = export._attention(
        nn.Identity(), q, k, v, None, scaling=0.3, is_causal=causal, cu_seq_lens_q=torch.tensor([0, 5, 6, 12])
    )
    for low, high in ((0, 5), (5, 6), (6, 12)):
        alone = [x[:, :, low:high] for x in (q, k, v)]
        expected = F.scaled_dot_product_attention(*alone, is_causal=causal, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(out[:, low:high], expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_numbers_of_images(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaVA makes a list of its images' features, and one tensor of the list."""
    compiled = models("llava", mesh="pp=2")
    verify(compiled)
    capture_no_more(monkeypatch)
    more = hf.llava_batch(2, 30)
    more["input_ids"][1, 12:21] = hf.IMAGE_TOKEN
    more["pixel_values"] = torch.cat([more["pixel_values"], more["pixel_values"][:1]])
    close(compiled, more)
    close(compiled, hf.llava_batch(2, 25))


# Lists of pieces


def _in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts))


def _reversed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)[::-1])


def _by_their_number(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) / len(parts)


def _one_of_them(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) + parts[0].mean()


def _one_changed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = parts
    return torch.cat([first * 2, *others])


def _along_the_width(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.mean(0, keepdim=True) for part in parts], dim=1).expand(4, -1)[:, :WIDTH]


def _weighed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A shape is asked otherwise than by its items."""
    one = (1,)
    longer = [part.view(part.shape + one)[..., 0] for part in parts]
    return torch.cat([part * (1 + (part.shape != (2, WIDTH))) for part in longer])


def _twice(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) + torch.cat(tuple(parts), dim=0)


class Written(nn.Module):
    """Writes to what it joined, and reads what it had split."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, labels: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        hidden = self.row(rows)
        joined = torch.cat(torch.split(hidden, counts.tolist()))
        joined.mul_(2)
        return F.cross_entropy(self.head((hidden + joined).tanh()), labels)


def test_a_join_is_a_tensor_of_its_own() -> None:
    torch.manual_seed(0)
    compiled = csc.compile(Written(), mesh="pp=1", example=placed_batch([2, 3]))
    for counts in ([2, 3], [4, 2, 5]):
        close(compiled, placed_batch(counts), FLOAT32)
    assert captures(compiled) == 1


class Album(nn.Module):
    """Rows of all images, taken apart by their numbers of rows, put together, and added up for the text."""

    def __init__(self, join: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        self.row, self.embed, self.head = nn.Linear(3, WIDTH), nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.join = join

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        images = self.join(torch.split(self.row(rows), counts.tolist()))
        logits = self.head(self.embed(ids) + images.tanh().sum(0))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def album_batch(counts: list[int]) -> Batch:
    ids = (torch.arange(2)[:, None] * 5 + torch.arange(6)) % 30
    rows = torch.sin(torch.arange(sum(counts) * 3.0)).view(-1, 3)
    return {"ids": ids, "labels": ids.roll(1, 1), "rows": rows, "counts": torch.tensor(counts)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("join", "needed"),
    [(_in_order, 1), (_twice, 1), (_reversed, 1), (_by_their_number, 2), (_one_of_them, 3), (_one_changed, 3),
     (_along_the_width, 3), (_weighed, 3)],
)  # fmt: skip
@pytest.mark.long_cases("_one_of_them-3", "_along_the_width-3", "_weighed-3", "_one_changed-3")
def test_a_split_that_is_joined_again_decides_nothing(join: Any, needed: int) -> None:
    """The others hold for these images alone: their captures are for one batch each, and right."""
    torch.manual_seed(0)
    compiled = csc.compile(Album(join), mesh="pp=1", example=album_batch([2, 3]))
    for counts in ([2, 3], [3, 2], [2, 2, 3]):
        close(compiled, album_batch(counts), FLOAT32)
    assert captures(compiled) == needed


class Slices(nn.Module):
    """A list of the images of a tensor, and one tensor of them again."""

    def __init__(self, join: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        self.row, self.head, self.join = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WORDS), join

    def forward(self, labels: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        hidden = self.join(list(self.row(images)))
        return F.cross_entropy(self.head(hidden).view(-1, WORDS), labels.flatten())


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts)


def _side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts, dim=1)


def _over_their_number(parts: list[torch.Tensor]) -> torch.Tensor:
    number = len(parts)
    return torch.stack(parts) / number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("join", "needed"), [(_in_order, 1), (_stacked, 1), (_side_by_side, 2), (_over_their_number, 2)]
)
def test_a_list_of_images(join: Any, needed: int) -> None:
    torch.manual_seed(0)
    compiled = csc.compile(Slices(join), mesh="pp=1", example=slices_batch(3))
    close(compiled, slices_batch(3), FLOAT32)
    close(compiled, slices_batch(5), FLOAT32)
    assert captures(compiled) == needed


def slices_batch(count: int) -> Batch:
    images = torch.sin(torch.arange(count * 4 * 3.0)).view(count, 4, 3)
    return {"labels": torch.arange(count * 4).view(count, 4) % WORDS, "images": images}


# Functions of a Python module


def places_of(counts: torch.Tensor, step: int, options: dict[str, Any]) -> torch.Tensor:
    """A place for each row, from 0 in each image."""
    return torch.cat([torch.arange(count) * step + options["first"] for count in counts.tolist()])


def whole_numbers(counts: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(count) for count in counts.tolist())


def places_by_tokens(labels: torch.Tensor) -> torch.Tensor:
    """From 1 in each of two runs, which the tokens tell: their lengths are read by who reads the pieces."""
    counts = torch.stack([(labels < 5).sum(), (labels >= 5).sum()])
    return torch.cat([part.cumsum(0) for part in torch.ones_like(labels).split(counts.tolist())])


class Placed(nn.Module):
    """Rows with learned places: of their image, and twice as far apart."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.row, self.place, self.head = nn.Linear(3, WIDTH), nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.kind = kind

    def learned_places(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.place.weight[:count] for count in counts.tolist()])

    def forward(self, labels: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.kind == "twice":
            placed = self.place(places_of(counts, 1, {"first": 0})) + self.place(places_of(counts, 2, {"first": 3}))
        elif self.kind == "parameter":
            placed = self.learned_places(counts)
        elif self.kind == "tokens":
            placed = self.place(places_by_tokens(labels))
        else:
            placed = self.place(torch.cat([torch.arange(count) for count in whole_numbers(counts)]))
        return F.cross_entropy(self.head((self.row(rows) + placed).tanh()), labels)


def placed_batch(counts: list[int]) -> Batch:
    rows = torch.sin(torch.arange(sum(counts) * 3.0)).view(-1, 3)
    return {"labels": torch.arange(sum(counts)) % WORDS, "rows": rows, "counts": torch.tensor(counts)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "calls", "needed"),
    [
        ("twice", ["places_of", "places_of_call2"], 1),
        ("tokens", ["places_by_tokens"], 1),
        ("parameter", [], 3),
        ("numbers", [], 3),
    ],
)
def test_functions_that_run_before_the_step(kind: str, calls: list[str], needed: int) -> None:
    """Those that give tensors and read no parameter; what the others decide holds for the values of one batch."""
    torch.manual_seed(0)
    compiled = csc.compile(Placed(kind), mesh="pp=1", example=placed_batch([2, 3]))
    for counts in ([2, 3], [3, 2], [4, 2, 5]):
        close(compiled, placed_batch(counts), FLOAT32)
    assert [call.prefix for call in compiled.compiler.guards.host.calls] == calls
    assert captures(compiled) == needed
    assert places_of.__module__ == __name__ and not hasattr(places_of, "__wrapped__")
