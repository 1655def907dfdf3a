"""Where what Inductor makes is kept: a folder for each compiler and CPU, which nobody else may write to."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from csc.cache import inductor_folder as kept
from csc.cache.model_entries import ModelEntries
from csc.cache.store import Store
from csc.capture.guards import Guards
from csc.ir.capture_guards import capture_guards, exactly
from csc.ir.program import Options


def test_each_compiler_and_cpu_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho one 1.0\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    store = Store(tmp_path / "cache")
    first = kept.inductor_folder(store)
    assert first is not None and first.is_dir() and kept.inductor_folder(store) == first
    compiler.write_text("#!/bin/sh\necho one 1.1\n")
    newer = kept.inductor_folder(store)
    monkeypatch.setattr(kept, "_cpu", lambda: "flags: fewer")
    assert len({first, newer, kept.inductor_folder(store)}) == 3
    assert store.entries() == [] and store.clear() == 0
    assert not list(store.folder.glob("inductor-*"))


def test_what_others_may_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    assert kept.inductor_folder(None) is None
    folder = kept.inductor_folder(store)
    assert folder is not None and folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    caplog.set_level(logging.WARNING, "csc")
    assert kept.inductor_folder(store) is None
    assert "others may write to" in caplog.text
    file = tmp_path / "file"
    file.write_text("")
    assert kept.inductor_folder(Store(file)) is None


@pytest.mark.parametrize("fuse", [True, False])
def test_what_another_compiler_makes_was_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuse: bool
) -> None:
    """Functions that are compiled anew are others than those that were found to be right."""
    model, given = nn.Linear(2, 2), {"x": torch.ones(1, 2)}
    guards = Guards(captures=(capture_guards(exactly(given), {}, (), {}, None),))
    match, options = guards.match(model, given), Options(fuse=fuse)
    entries = ModelEntries(model, Store(tmp_path / "cache"))
    entries.keep_checked("equal", match, options)
    assert entries.checked(match, options) == "equal"
    monkeypatch.setattr(kept, "_compiler", lambda: "another")
    assert entries.checked(match, options) == ("" if fuse else "equal")
