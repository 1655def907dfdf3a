"""Where what Inductor makes is kept: a folder for each compiler and CPU, which nobody else may write to."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from csc.cache import inductor_folder as kept
from csc.cache.store import Store


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
