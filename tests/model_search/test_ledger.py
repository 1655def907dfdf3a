"""A ledger that was cut anywhere keeps every record that was finished, and goes on."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from csc.errors import InputError
from csc.model_search.ledger import Ledger

HEAD = {"encoders": ["a"], "samples": 8}


def test_a_file_that_was_cut_anywhere_goes_on(tmp_path: Path) -> None:
    whole = Ledger(tmp_path / "whole", HEAD)
    ends = []
    for number in range(4):
        whole.add({"kind": "trial", "number": number})
        ends.append(whole.path.stat().st_size)
    content = whole.path.read_bytes()
    for cut in range(len(content) + 1):
        path = tmp_path / "cut"
        path.write_bytes(content[:cut])
        ledger = Ledger(path, HEAD)
        finished = [number for number, end in enumerate(ends) if cut >= end - 1]  # all but its end of line
        assert [record["number"] for record in ledger.records("trial")] == finished
        ledger.add({"kind": "trial", "number": 99})
        assert [record["number"] for record in Ledger(path, HEAD).records("trial")] == [*finished, 99]


def test_another_search_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger", HEAD)
    with pytest.raises(InputError, match="of a search with samples 8, and this one has 9"):
        Ledger(tmp_path / "ledger", {**HEAD, "samples": 9})
    with pytest.raises(InputError, match="seed"):
        Ledger(tmp_path / "ledger", {**HEAD, "seed": 1})


def add(path: Path, process: int) -> None:
    ledger = Ledger(path, HEAD)
    for number in range(50):
        ledger.add({"kind": "trial", "of": process, "number": number, "text": "x" * 500})


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    Ledger(path, HEAD)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add, args=(path, n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    records = Ledger(path, HEAD).records("trial")
    assert sorted((record["of"], record["number"]) for record in records) == [
        (p, n) for p in range(3) for n in range(50)
    ]
    assert all(json.loads(line)["kind"] for line in path.read_text().splitlines() if line)


def test_a_number_that_json_has_not_is_not_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", HEAD)
    with pytest.raises(ValueError, match="JSON"):
        ledger.add({"kind": "trial", "score": float("nan")})
    assert ledger.records("trial") == []
