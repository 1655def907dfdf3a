"""What is kept of a compiled function, and when it is found again. Nothing here runs Inductor."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from csc.runtime import compiled_function as kept
from csc.runtime.flat_tensors import layouts_of, nesting, structure_of, tensors_of
from tests.launching import PATIENCE

GIVEN = ({"weight": torch.eye(2)}, (torch.ones(2, 2), torch.zeros(3)))


def function(w: dict[str, torch.Tensor], saved: tuple[torch.Tensor, torch.Tensor]) -> Any:
    first, second = saved
    return {"sum": first + w["weight"], "rest": (second, first)}, second


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were compiled, in order; each is the function itself."""
    files: list[Path] = []

    def artifact(flat: Callable[..., Any], given: Any, settings: Any, file: Path, _: Any) -> Any:
        flat(*given)
        files.append(file)
        file.write_text("compiled")
        return flat

    def artifact_of(file: Path, settings: Any) -> Any:
        return (lambda *tensors: tensors_of(function(*GIVEN))) if file.is_file() else None

    monkeypatch.setattr(kept, "artifact", artifact)
    monkeypatch.setattr(kept, "artifact_of", artifact_of)
    monkeypatch.setattr(kept, "vector_sets_are_proven", lambda _: True)
    return files


def compiled(text: str, given: Any, folder: Path, wait: bool = True) -> tuple[kept.CompiledFunction | None, bool]:
    return place(text, given, folder).made(function, given, wait)


def place(text: str, given: Any, folder: Path) -> kept.KeptFunction:
    return kept.KeptFunction("function", text, structure_of(given), layouts_of(tensors_of(given)), folder)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


def test_a_function_is_made_once_and_found_as_it_was(tmp_path: Path, made: list[Path]) -> None:
    tensors = tensors_of(GIVEN)
    for number in range(2):
        result, found = compiled("text", GIVEN, tmp_path)
        assert found == bool(number) and result is not None
        (named, second), expected = result(tensors), function(*GIVEN)
        assert list(named) == ["sum", "rest"] and isinstance(named["rest"], tuple)
        assert same((named, second), expected)
    assert len(made) == 1
    assert place("text", GIVEN, tmp_path).read() is not kept.MISSING
    assert place("edited", GIVEN, tmp_path).read() is kept.MISSING


def test_other_text_layouts_and_settings_are_others(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (w, (first, second)) = GIVEN
    others: list[tuple[str, Any]] = [
        ("text", GIVEN), ("edited", GIVEN), ("text", (w, (first.t(), second))), ("text", (w, (first.double(), second))),
        ("text", (w, (first, torch.zeros(4)))),
    ]  # fmt: skip
    others[2] = ("text", (w, (torch.ones(2, 4)[:, ::2], second)))  # other strides
    for text, given in others:
        compiled(text, given, tmp_path)
    monkeypatch.setattr(kept, "inductor_settings", lambda: "others")
    compiled("text", GIVEN, tmp_path)
    monkeypatch.setenv(kept.SETS_BUILD, "0")
    compiled("text", GIVEN, tmp_path)
    assert len(set(made)) == len(made) == 7


def test_what_is_lost_or_cut_short_is_made_again(tmp_path: Path, made: list[Path]) -> None:
    for lost in (".bin", ".json"):
        compiled("text", GIVEN, tmp_path)
        (file,) = (tmp_path / "functions").glob(f"*{lost}")
        file.unlink()
    compiled("text", GIVEN, tmp_path)
    assert len(made) == 3
    (file,) = (tmp_path / "functions").glob("*.json")
    file.write_text("{")
    assert compiled("text", GIVEN, tmp_path)[1] is False


def _hold(file: Path, held: Any, go: Any) -> None:
    with kept._alone(file):
        held.set()
        go.wait(PATIENCE)
        file.write_text("made")


def test_others_wait_for_who_makes_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, go = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "file", held, go))
    process.start()
    assert held.wait(PATIENCE)
    with pytest.raises(kept.BeingMadeError), kept._alone(tmp_path / "file", wait=False):
        pass
    go.set()
    with kept._alone(tmp_path / "file"):
        assert (tmp_path / "file").read_text() == "made"
    process.join()


def test_other_values_than_tensors_are_refused() -> None:
    for other in (None, 3, [torch.ones(1)]):
        with pytest.raises(TypeError):
            tensors_of((torch.ones(1), {"a": other}))


@pytest.mark.parametrize("nested", [
    (torch.ones(1), {"a": torch.ones(2), "b": torch.ones(3)}), {}, (), {"a": (torch.ones(1), torch.ones(2)), "b": {}},
    ((torch.ones(1), (torch.ones(2), torch.ones(3))), torch.ones(4)), torch.ones(5),
])  # fmt: skip
def test_tensors_are_nested_as_they_were(nested: Any) -> None:
    flat = tensors_of((nested,))
    made = nesting(structure_of((nested,)))
    for _ in range(2):
        (again,) = made(flat)
        assert structure_of(again) == structure_of(nested) and type(again) is type(nested)
        assert all(one is other for one, other in zip(tensors_of((again,)), flat, strict=True))


def test_layouts_of_images_say_whether_channels_come_last() -> None:
    """Of one channel no entry says it, and torch takes a convolution's layout from the stride."""
    image = torch.ones(2, 1, 8, 8)
    assert layouts_of([image]) != layouts_of([image.to(memory_format=torch.channels_last)])
    row = torch.ones(1, 8)
    assert layouts_of([row]) == layouts_of([row.as_strided((1, 8), (3, 1))])


def test_strides_of_one_place_are_no_other_layout() -> None:
    """One key head: ATen's kernel and Inductor's give the same gradient with other strides of that dimension."""
    heads = torch.ones(2, 1, 8, 4)
    others = [heads.as_strided((2, 1, 8, 4), (32, stride, 4, 1)) for stride in (4, 8, 32, 64)]
    assert all(layouts_of([one]) == layouts_of([heads]) for one in others)


@pytest.mark.parametrize(
    "sizes", [(2, 1, 4, 4), (1, 3, 4, 4), (2, 3, 1, 4), (1, 1, 1, 4), (1, 1, 4, 1), (2, 1, 3, 4, 4)]
)
def test_what_torch_makes_of_layouts_that_are_equal_is_equal(sizes: tuple[int, ...]) -> None:
    """Of the same sizes and entries, whichever stride the dimensions with one place have."""
    made: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    last = torch.channels_last if len(sizes) == 4 else torch.channels_last_3d
    ones = [place for place, size in enumerate(sizes) if size == 1]
    for image in (torch.ones(sizes), torch.ones(sizes).to(memory_format=last)):
        for strides in product((1, 2, 3, 4, 8, 16, 48, 96), repeat=len(ones)):
            own = [*image.stride()]
            for place, stride in zip(ones, strides):
                own[place] = stride
            one = image.as_strided(sizes, own)
            resized = torch.nn.functional.interpolate(one, scale_factor=2.0)  # asks for the format that one suggests
            made[str(layouts_of([one]))].add(resized.stride())
    assert len(made) > 1
    assert all(len(strides) == 1 for strides in made.values())
