"""Whose rows are whose, read off batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from csc.driver.batches import Belonging, belongings, by_count, miscounted, token_ids
from csc.errors import InputError
from tests.models import mixed

IMAGE = {"image": 99}


@pytest.mark.parametrize("counts", [[2, 0, 1, 1], [1, 3, 0, 2], [1, 1, 1, 1], [0, 2, 1, 2], [0, 1]])
@pytest.mark.parametrize("name", mixed.CASES)
def test_every_row_is_its_samples(name: str, counts: list[int]) -> None:
    model, batch = mixed.built(name, counts)
    found = belongings(batch, token_ids(model))
    assert found.keys() == batch.keys()
    case = mixed.CASES[name]
    for entry, belonging in found.items():
        if entry in ("pixel_values", "pixel_attention_mask") and case.make is mixed.slots:
            expected: Sequence[int] = [1] * len(counts)
        elif entry == "pixel_values" and case.make is mixed.qwen:
            expected = [sum(h * w for h, w in own) for own in mixed.samples(case, counts)]
        elif entry in ("pixel_values", "image_grid_thw", "image_sizes", "input_features", "feature_attention_mask"):
            expected = counts
        else:
            expected = [1] * len(counts)
        assert belonging == Belonging(tuple(expected)), entry


def text(places: list[list[int]]) -> torch.Tensor:
    """Placeholders in runs of so many, a word between and around them."""
    rows = [[1] + [token for run in own for token in [99] * run + [1]] for own in places]
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def rows(places: list[list[int]], entry: str = "pixel_values", **entries: torch.Tensor) -> tuple[int, ...] | None:
    found = belongings({"input_ids": text(places), **entries}, IMAGE).get(entry)
    return None if found is None else found.rows


def test_runs_of_places_where_sizes_are_not_in_proportion() -> None:
    sizes = torch.tensor([[2, 3], [3, 3], [5, 4]])
    tiles = torch.zeros(3, 4, 3, 8, 8)
    assert rows([[5, 7], [9]], pixel_values=tiles, image_sizes=sizes) == (2, 1)
    assert rows([[12], [9], [8]], pixel_values=tiles, image_sizes=sizes) == (1, 1, 1)


def test_images_beside_each_other() -> None:
    """Whose places are one run."""
    assert rows([[12], [4], []], pixel_values=torch.zeros(4, 3, 8, 8)) == (3, 1, 0)
    grid = torch.tensor([[1, 4, 4], [1, 4, 6], [1, 8, 4]])
    assert rows([[4 + 6], [8]], pixel_values=torch.zeros(16 + 24 + 32, 5), image_grid_thw=grid) == (40, 32)


def test_grids_that_are_merged_differently() -> None:
    grid, merged = torch.tensor([[1, 4, 4], [1, 4, 4], [1, 8, 4]]), torch.tensor([2, 1, 2])
    pixels = torch.zeros(64, 5)
    assert rows([[4, 16], [8]], pixel_values=pixels, image_grid_thw=grid, image_merge_sizes=merged) == (32, 32)
    assert rows([[4], [16, 8]], pixel_values=pixels, image_grid_thw=grid, image_merge_sizes=merged) == (16, 48)


def test_an_entry_that_says_how_many_images_there_are() -> None:
    sizes, tiles = torch.tensor([[2, 3], [3, 3], [5, 4]]), torch.zeros(3, 4, 3, 8, 8)
    told = torch.tensor([2, 1])
    assert rows([[13], [9]], pixel_values=tiles, image_sizes=sizes, batch_num_images=told) == (2, 1)
    assert rows([[13], [9]], "batch_num_images", pixel_values=tiles, image_sizes=sizes, batch_num_images=told) == (1, 1)


def test_images_and_videos_in_one_batch() -> None:
    ids = text([[4], [6, 4]])
    ids[1, 1:7] = 98
    entries = {
        "input_ids": ids,
        "pixel_values": torch.zeros(32, 5), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "pixel_values_videos": torch.zeros(24, 5), "video_grid_thw": torch.tensor([[2, 2, 6]]),
    }  # fmt: skip
    found = belongings(entries, {"image": 99, "video": 98})
    assert {name: one.rows for name, one in found.items()} == {
        "input_ids": (1, 1), "pixel_values": (16, 16), "image_grid_thw": (1, 1), "pixel_values_videos": (0, 24),
        "video_grid_thw": (0, 1),
    }  # fmt: skip


def test_patches_that_are_not_those_of_the_grid() -> None:
    grid = torch.tensor([[1, 4, 4], [1, 2, 2]])
    entries = {"input_ids": text([[4], [1]]), "pixel_values": torch.zeros(18, 5), "image_grid_thw": grid}
    known = belongings(entries, IMAGE)
    assert miscounted(entries, known) == ("pixel_values", "image_grid_thw", 20)
    assert miscounted(entries, [*known, "pixel_values"]) is None
    right = {**entries, "pixel_values": torch.zeros(20, 5)}
    assert miscounted(right, belongings(right, IMAGE)) is None


def test_token_types_say_it_where_no_config_does() -> None:
    ids = text([[4, 4], [4]])
    entries = {"input_ids": ids, "mm_token_type_ids": (ids == 99).int(), "pixel_values": torch.zeros(3, 3, 8, 8)}
    assert belongings(entries, {})["pixel_values"].rows == (2, 1)


def test_positions_of_several_axes() -> None:
    ids = text([[4], [4]])
    entries = {"input_ids": ids, "position_ids": torch.zeros(3, *ids.shape)}
    assert belongings(entries, {})["position_ids"] == Belonging((1, 1), dim=1)


def test_what_nothing_is_known_of() -> None:
    """Nobody guesses: places that no number of images has, entries of which no name speaks, and no tokens at all."""
    assert (
        rows([[5], [4]], pixel_values=torch.zeros(3, 3, 8, 8), image_sizes=torch.tensor([[1, 2], [3, 4], [5, 6]]))
        is None
    )
    assert rows([[4], [4]], "chunks", chunks=torch.zeros(6, 2)) is None
    assert belongings({"x": torch.zeros(4, 2)}, IMAGE) == {}


def test_what_has_a_row_for_each_video_goes_with_the_videos() -> None:
    """Hugging Face's `second_per_grid_ts` of Qwen2.5-VL: one number a video, in no entry's name."""
    grids = torch.tensor([[1, 4, 4], [2, 4, 4], [1, 4, 6]])
    batch = {
        "input_ids": text([[4, 8], [6]]), "pixel_values_videos": torch.zeros(16 + 32 + 24, 5),
        "video_grid_thw": grids, "second_per_grid_ts": torch.tensor([1.0, 0.5, 2.0]),
    }  # fmt: skip
    found = belongings(batch, {"video": 99})
    assert found["second_per_grid_ts"] == found["video_grid_thw"] == Belonging((2, 1))
    assert found["pixel_values_videos"] == Belonging((48, 24))


# Documents that are packed into rows


def beginnings(*ends: int) -> torch.Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32)


def test_sequences_begin_in_the_tokens_of_samples_or_in_their_patches() -> None:
    grid = torch.tensor([[1, 4, 4], [1, 4, 6], [1, 8, 4]])
    batch = {
        "input_ids": text([[10], [8]]), "cu_seqlens": beginnings(5, 12, 24), "pixel_values": torch.zeros(72, 5),
        "image_grid_thw": grid, "cu_window_seqlens": beginnings(16, 40, 72), "image_cu_seqlens": beginnings(40, 72),
    }  # fmt: skip
    found = belongings(batch, IMAGE)
    assert found["cu_seqlens"] == Belonging((12, 12), begins=True)
    assert found["pixel_values"] == Belonging((40, 32))
    assert found["cu_window_seqlens"] == found["image_cu_seqlens"] == Belonging((40, 32), begins=True)


def test_sequences_begin_in_tokens_without_padding() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    batch = {"input_ids": torch.ones(2, 4).long(), "attention_mask": mask, "cu_seq_lens_q": beginnings(3, 4, 6)}
    assert belongings(batch, {})["cu_seq_lens_q"] == Belonging((4, 2), begins=True)
    assert "cu_seq_lens_q" not in belongings(batch | {"cu_seq_lens_q": beginnings(3, 7)}, {})


@pytest.mark.parametrize("begins", ["cu_seqlens", "position_ids"])
def test_a_row_for_each_document_goes_with_the_documents(begins: str) -> None:
    def batch(*lengths: int) -> dict[str, torch.Tensor]:
        positions = torch.cat([torch.arange(length) for length in lengths])
        said = beginnings(*torch.tensor(lengths).cumsum(0).tolist()) if begins == "cu_seqlens" else positions.view(2, 4)
        return {"input_ids": torch.ones(2, 4).long(), begins: said, "weights": torch.ones(len(lengths))}

    five, four = batch(1, 1, 1, 1, 4), batch(1, 1, 2, 4)
    assert by_count("weights", five, belongings(five, {})) == Belonging((4, 1))
    with pytest.raises(InputError, match=r"'weights' has 4 rows, .* \[2, 2\] or \[3, 1\]"):
        by_count("weights", four, belongings(four, {}))
    assert by_count("weights", five | {"weights": torch.ones(7)}, belongings(five, {})) is None


def test_a_document_in_two_samples_is_counted_nowhere() -> None:
    batch = {"input_ids": torch.ones(2, 4).long(), "cu_seqlens": beginnings(3, 6, 8), "weights": torch.ones(3)}
    assert by_count("weights", batch, belongings(batch, {})) is None


def test_a_row_for_each_picture_goes_with_the_pictures() -> None:
    batch = {"input_ids": text([[4, 4], [4]]), "pixel_values": torch.zeros(3, 3, 8, 8), "scores": torch.ones(3)}
    assert by_count("scores", batch, belongings(batch, IMAGE)) == Belonging((2, 1))
