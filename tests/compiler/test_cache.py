"""The cache: what it gives is what a fresh compilation gives, without tracing; what it cannot know, it does not keep.

A new CompiledModel of a new model has nothing of an earlier one but the folder: it is as a new process is.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from csc.codegen.write import contents, sources
from csc.passes.pipeline import planning
from csc.passes.runner import after, run
from torch import nn

import csc
from csc.cache.store import Store
from csc.commands.main import main
from csc.errors import InputError
from csc.ir.printer import program_text
from csc.ir.stored import Unstorable, from_tree, to_tree
from tests import launching
from tests.compiler import small
from tests.compiler.conftest import Models
from tests.compiler.test_image_sizes import Placed, close, placed_batch
from tests.compiler.test_replay import Deciding
from tests.compiler.test_replay import batch as decided_batch
from tests.compiler.test_values import Reader, equal, reader_batch
from tests.exactness import FLOAT32


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path / "cache"))
    return Store(tmp_path / "cache")


def reader(batch: Any = None, **options: Any) -> csc.CompiledModel:
    torch.manual_seed(0)
    return csc.compile(Reader(), example=batch or reader_batch([[2, 3], [1, 4]]), **{"mesh": "pp=2", **options})


def mixed(**options: Any) -> csc.CompiledModel:
    return csc.compile(small.mixed(), example=small.mixed_batch(), **{"mesh": "pp=2", **options})


def captures(compiled: csc.CompiledModel) -> int:
    return len(compiled.compiler.captures)


def written(compiled: csc.CompiledModel, directory: Path) -> dict[str, bytes]:
    """The files that a training process runs, without the seconds that they took."""
    compiled._programs._broadcast._home = directory
    compiled.trainer()
    assert (directory / "example.safetensors").exists()
    return untimed(directory)


def untimed(directory: Path) -> dict[str, bytes]:
    files = contents(directory)
    table = json.loads(files["program.json"])
    assert table.pop("timings")["partition"] > 0
    return {**files, "program.json": json.dumps(table, indent=1).encode()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("llava", {"mesh": "pp=3"}), ("mixed", {}), ("text", {"mesh": "cp=2"})])
@pytest.mark.long_cases("text-options2")
def test_a_stored_program_reads_back_text_for_text(name: str, options: dict[str, Any], models: Models) -> None:
    compiled = models(name, **options)
    history = compiled.history()
    traced = after(history, "views")
    tree, tensors = to_tree(traced)
    again = from_tree(json.loads(json.dumps(tree)), {key: tensor.contiguous() for key, tensor in tensors.items()})
    assert program_text(again) == program_text(traced)
    assert to_tree(again)[0] == tree
    assert all(torch.equal(again.constants[key], tensor) for key, tensor in traced.constants.items())
    planned = run([again], planning(compiled.options), compiled.options)[-1]
    assert sources(planned, compiled.options) == sources(history[-1], compiled.options)
    with pytest.raises(Unstorable):
        to_tree(history[-1])


@pytest.mark.slow
def test_the_same_start_again_traces_nothing(cache: Store, tmp_path: Path) -> None:
    """A model with a function on the host, values that decide, and placeholders."""
    first = reader()
    fresh = written(first, tmp_path / "first")
    kinds = {entry.kind for entry in cache.entries()} - {"checked"}
    assert captures(first) == 1 and kinds == {"capture", "program", "trace", "guards"}
    again = reader()
    assert written(again, tmp_path / "again") == fresh == written(reader(cache=False), tmp_path / "without")
    assert captures(again) == 0 and not again.compiler.traced
    equal(again)
    batch = reader_batch([[2, 3], [1, 4]], first=9)  # other tokens: the function counts positions again
    equal(again, {name: batch[name].flip(1) if name in ("ids", "labels") else batch[name] for name in batch})
    broken = reader_batch([[2, 3], [1, 4]])
    broken["ids"][0, 1] = 5
    with pytest.raises(InputError, match="placeholders for"):
        again.train_step(broken)
    assert captures(again) == 0


def restored(compiled: csc.CompiledModel) -> int:
    return len(compiled.compiler.restored)


@pytest.mark.slow
def test_a_new_length_in_a_new_process_is_lowered_from_the_stored_trace(cache: Store) -> None:
    """Images of other sizes, more of them, and another length: nothing is traced, and the program is the same."""
    reader().trainer()
    longer = reader_batch([[2, 3], [1, 4]], length=11)
    again = reader(longer)
    equal(again, longer)
    assert (captures(again), restored(again)) == (0, 1)
    fresh = csc.compile(again.model, mesh="pp=2", example=longer, cache=False)
    assert program_text(again.program) == program_text(fresh.program)

    torch.manual_seed(0)
    csc.compile(Placed("twice"), mesh="pp=1", example=placed_batch([2, 3])).trainer()
    other = csc.compile(Placed("twice"), mesh="pp=1", example=placed_batch([4, 2, 5]))
    close(other, placed_batch([4, 2, 5]), FLOAT32)
    close(other, placed_batch([7, 2]), FLOAT32)
    assert (captures(other), restored(other)) == (0, 1)
    assert [len(other.history()), captures(other)] == [len(fresh.history()), 1]  # what is shown is traced


@pytest.mark.slow
def test_a_stored_trace_serves_other_values_with_which_the_code_does_the_same(cache: Store) -> None:
    csc.compile(Deciding("branch"), mesh="pp=1", example=decided_batch(4, 2)).trainer()
    again = csc.compile(Deciding("branch"), mesh="pp=1", example=decided_batch(3, 3))
    close(again, decided_batch(3, 3), FLOAT32)
    close(again, decided_batch(5, 2), FLOAT32)
    assert (captures(again), restored(again)) == (0, 1)
    close(again, decided_batch(2, 3), FLOAT32)  # the other branch
    assert captures(again) == 1


@pytest.mark.slow
def test_a_stored_trace_for_other_values_or_sizes_is_not_taken(cache: Store) -> None:
    reader().trainer()
    other = reader(reader_batch([[2, 2], [1, 1]]))  # the model decides by these values
    equal(other, reader_batch([[2, 2], [1, 1]]))
    assert (captures(other), restored(other)) == (1, 0)


def test_functions_of_a_python_module_are_kept(cache: Store) -> None:
    """With their calls' values, dictionaries too: a batch with images of other sizes needs no trace of this process."""

    def placed() -> csc.CompiledModel:
        torch.manual_seed(0)
        return csc.compile(Placed("twice"), mesh="pp=1", example=placed_batch([2, 3]))

    placed().trainer()
    again = placed()
    equal(again, placed_batch([3, 2]))
    assert captures(again) == 0
    assert [call.prefix for call in again.compiler.guards.host.calls] == ["places_of", "places_of_call2"]


def made(cache: Store) -> int:
    """How many entries there are of what was compiled: not of what was compared."""
    return sum(entry.kind != "checked" for entry in cache.entries())


@pytest.mark.slow
def test_other_lengths_are_compiled_once(cache: Store) -> None:
    batches = [reader_batch([[2, 3], [1, 4]], length) for length in (7, 11)] + [reader_batch([[2, 2], [1, 1]])]
    for start in range(2):
        compiled = reader()
        for batch in batches:
            equal(compiled, batch)
        entries = made(cache)
        for batch in batches:
            compiled.train_step(batch)
        assert captures(compiled) == (2 if start == 0 else 0)  # the sizes of images decide
        assert made(cache) == entries


@pytest.mark.slow
def test_another_frozen_set_starts_from_the_traced_graphs(cache: Store, tmp_path: Path) -> None:
    reader()
    batch = [reader_batch([[2, 3], [1, 4]])] * 2
    for number, options in enumerate(({"freeze": ["layers"], "mesh": "pp=3"}, {"microbatches": 2, "mesh": "pp=1"})):
        again = reader(batch[: options.get("microbatches", 1)], **options)
        fresh = reader(batch[: options.get("microbatches", 1)], **options, cache=False)
        assert captures(again) == 0 and captures(fresh) == 1
        assert written(again, tmp_path / f"again{number}") == written(fresh, tmp_path / f"fresh{number}")
        equal(again)


def _start(folder: str, freeze: list[str]) -> None:
    compiled = csc.compile(small.mixed, mesh="pp=2", example=small.mixed_batch, freeze=freeze)
    compiled.inspected.progress = print
    compiled.prepare()
    compiled.write(folder)


@pytest.mark.slow
def test_in_another_process(cache: Store, tmp_path: Path) -> None:
    def started(folder: str, freeze: list[str]) -> list[str]:
        return launching.alone(_start, str(tmp_path / folder), freeze).split("\n")

    assert started("first", [])[0] == "capture"
    assert started("second", ["body"])[:3] == ["traced graphs, from the cache", "freeze", "prune"]
    fresh = mixed(freeze=["body"], cache=False)
    assert untimed(tmp_path / "second") == untimed(fresh.write(tmp_path / "here"))
    assert started("third", ["body"])[0] == "program, from the cache"
    assert untimed(tmp_path / "third") == untimed(tmp_path / "here")


@pytest.mark.slow
def test_what_lies_between_is_traced_when_it_is_asked_for(cache: Store) -> None:
    expected = [program_text(program) for program in mixed().history()]
    again = mixed()
    assert captures(again) == 0
    assert program_text(again.program) == expected[-1] and captures(again) == 0
    assert [program_text(program) for program in again.history()] == expected and captures(again) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["program", "trace", "capture"])
@pytest.mark.long_cases("capture", "trace")
def test_a_damaged_entry_is_made_again(
    kind: str, cache: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = written(mixed(), tmp_path / "fresh")
    for later in {"program": (), "trace": ("program",), "capture": ("program", "trace")}[kind]:
        cache.clear(cache.keys(later)[0])
    (key,) = cache.keys(kind)
    files = cache.read(kind, key)
    assert files is not None
    cache.clear(key)
    broken = {"program": "places.json", "trace": "trace.json", "capture": "capture.json"}[kind]
    cache.write(kind, key, {**files, broken: b'{"format": 1, "graphs": [[["call_function"]]]}'}, {})  # hashes are right
    with caplog.at_level(logging.WARNING, "csc"):
        again = mixed()
    assert f"{kind} {key[:12]} is damaged" in caplog.text
    assert (captures(again), restored(again)) == {"program": (0, 0), "trace": (0, 1), "capture": (1, 0)}[kind]
    assert written(again, tmp_path / "again") == fresh
    caplog.clear()
    assert captures(mixed()) == 0 and "damaged" not in caplog.text


def test_an_opaque_model_is_compiled_and_not_kept(cache: Store, caplog: pytest.LogCaptureFixture) -> None:
    model = small.mixed()
    model.body.state = random.Random(3)  # type: ignore[assignment]
    with caplog.at_level(logging.INFO, "csc"):
        compiled = csc.compile(model, example=small.mixed_batch())
    assert "Mixed is not cached: body.state is a random.Random" in caplog.text
    assert cache.entries() == [] and compiled.train_step(small.mixed_batch()).isfinite()


@pytest.mark.slow
def test_an_opaque_module_belongs_to_its_process(cache: Store, caplog: pytest.LogCaptureFixture) -> None:
    def compiled() -> csc.CompiledModel:
        model = small.mixed()
        csc.opaque(model.body.linear)
        return csc.compile(model, example=small.mixed_batch())

    with caplog.at_level(logging.INFO, "csc"):
        loss = compiled().train_step(small.mixed_batch())
    assert "Mixed is not cached: it holds an opaque module" in caplog.text
    assert {entry.kind for entry in cache.entries()} <= {"checked"}
    assert torch.equal(compiled().train_step(small.mixed_batch()), loss)


@pytest.mark.slow
def test_a_model_that_is_changed_later_is_kept_as_another(cache: Store, caplog: pytest.LogCaptureFixture) -> None:
    compiled = mixed()
    before = {entry.key for entry in cache.entries()}
    compiled.model.body.norm.eps = 0.5
    with caplog.at_level(logging.INFO, "csc"):
        compiled.with_options(freeze=["body"]).trainer()
    assert "has changed since it was compiled: attribute body.norm.eps" in caplog.text
    assert {entry.key for entry in cache.entries()} > before


@pytest.mark.slow
def test_a_model_that_its_own_forward_changes_is_found_again(cache: Store) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = small.mixed(), 0

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(**batch)

    counts = [captures(csc.compile(Counting(), example=small.mixed_batch())) for _ in range(2)]
    assert counts == [1, 0]


@pytest.mark.slow
def test_the_command_line(cache: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["csc", "cache", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0), capsys.readouterr().out

    mixed().trainer()
    code, text = command("list")
    assert code == 0 and "Mixed" in text and "pp=2" in text and "3 entries" in text
    listed = json.loads(command("list", "--json")[1])
    assert {entry["kind"] for entry in listed["entries"]} == {"capture", "program", "trace"}
    assert command("path") == (0, f"{cache.folder}\n")
    assert command("clear", "nothing")[0] == 2
    assert command("clear", listed["entries"][0]["key"][:12]) == (0, "1 entries removed\n")
    assert command("clear") == (0, "2 entries removed\n") and list(cache.folder.iterdir()) == []
    monkeypatch.setenv("CSC_CACHE", "0")
    assert "switched off" in command("list")[1]
