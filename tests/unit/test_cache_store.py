"""The cache's folder: whole entries or none, for several processes, damaged or not, and never over its limit."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from csc.cache.store import Store, location, store
from csc.errors import InputError
from tests.launching import PATIENCE

FILES = {"program/rank_0.py": b"x = 1\n", "places.json": b"{}", "big": bytes(5000)}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    kept = Store(tmp_path / "there" / "cache")
    assert kept.read("program", "abc") is None and kept.entries() == []
    assert kept.write("program", "abc", FILES, {"name": "Net"})
    assert kept.read("program", "abc") == FILES
    assert kept.read("trace", "abc") is None
    (entry,) = kept.entries()
    assert (entry.kind, entry.key, entry.hits, entry.about) == ("program", "abc", 1, {"name": "Net"})
    assert entry.size == sum(map(len, FILES.values()))


def _shorter(place: Path) -> None:
    (place / "big").write_bytes(bytes(4999))


def _changed(place: Path) -> None:
    (place / "program/rank_0.py").write_bytes(b"x = 2\n")


def _missing(place: Path) -> None:
    (place / "places.json").unlink()


def _unlisted(place: Path) -> None:
    (place / "entry.json").unlink()


def _half_written(place: Path) -> None:
    (place / "entry.json").write_text((place / "entry.json").read_text()[:40])


def _another(place: Path) -> None:
    (place / "entry.json").write_text('["no", "entry"]')


def _outside(place: Path) -> None:
    listed = json.loads((place / "entry.json").read_text())
    listed["files"]["../../secret"] = listed["files"]["places.json"]
    (place / "entry.json").write_text(json.dumps(listed))


def _renamed(place: Path) -> None:
    listed = json.loads((place / "entry.json").read_text())
    (place / "entry.json").write_text(json.dumps({**listed, "key": "def"}))


@pytest.mark.parametrize(
    "damage", [_shorter, _changed, _missing, _unlisted, _half_written, _another, _renamed, _outside]
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Store(tmp_path)
    kept.write("program", "abc", FILES, {})
    damage(tmp_path / "program-abc")
    assert len(kept.entries()) == 1  # listed, and counted, all the same
    with caplog.at_level(logging.WARNING, "csc"):
        assert kept.read("program", "abc") is None
    assert "program abc is damaged" in caplog.text and "made again" in caplog.text
    assert kept.entries() == []
    assert kept.write("program", "abc", FILES, {}) and kept.read("program", "abc") == FILES


def _open_file(place: Path) -> None:
    (place / "program/rank_0.py").chmod(0o660)


def _open_entry(place: Path) -> None:
    place.chmod(0o777)


def _open_folder_within(place: Path) -> None:
    (place / "program").chmod(0o702)


def _open_cache(place: Path) -> None:
    place.parent.chmod(0o770)


def _linked_entry(place: Path) -> None:
    place.rename(place.with_name("elsewhere"))
    place.symlink_to(place.with_name("elsewhere"))


def _linked_file(place: Path) -> None:
    (place / "big").rename(place.parent / "big")
    (place / "big").symlink_to(place.parent / "big")


def _linked_folder(place: Path) -> None:
    (place / "program").rename(place.parent / "program")
    (place / "program").symlink_to(place.parent / "program")


def _pipe(place: Path) -> None:
    (place / "big").unlink()
    os.mkfifo(place / "big")


REFUSED = {
    "others may write to .*rank_0.py": _open_file, "others may write to program-abc ": _open_entry,
    "others may write to program-abc/program ": _open_folder_within, "others may write to .*cache ": _open_cache,
    "program-abc is a symbolic link": _linked_entry, "big is a symbolic link": _linked_file,
    "program-abc/program is a symbolic link": _linked_folder, "big is no plain file": _pipe,
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_others_may_have_written_is_not_used(why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Store(tmp_path / "cache")
    kept.write("program", "abc", FILES, {})
    assert kept.read("program", "abc") == FILES
    REFUSED[why](tmp_path / "cache" / "program-abc")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with caplog.at_level(logging.WARNING, "csc"):
        assert kept.read("program", "abc") is None
    assert re.search(f"is not used: .*{why}", caplog.text)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before, "it is not csc's to remove"


def test_a_cache_of_another_user_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(tmp_path).write("program", "abc", FILES, {})
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # all of it is somebody else's now
    kept = Store(tmp_path)
    with caplog.at_level(logging.WARNING, "csc"):
        assert kept.read("program", "abc") is None and not kept.write("program", "def", FILES, {})
    assert caplog.text.count("belongs to another user") == 1 and len(kept.keys("program")) == 1


def test_what_is_written_is_the_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        kept = Store(tmp_path / "cache")
        kept.write("program", "abc", FILES, {})
        assert kept.read("program", "abc") == FILES == kept.read("program", "abc")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache").rglob("*")} <= {0o600, 0o700}


def test_a_cache_on_another_disk_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    kept = Store(tmp_path / "cache")
    assert kept.write("program", "abc", FILES, {}) and kept.read("program", "abc") == FILES


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    kept = Store(tmp_path, limit=2500)
    for age, key in ((3, "a1"), (2, "a2")):
        kept.write("trace", key, {"a": bytes(1000)}, {})
        os.utime(tmp_path / f"trace-{key}" / "entry.json", (1e9 - age, 1e9 - age))
    assert kept.read("trace", "a1") is not None  # now "a2" is the one
    kept.write("program", "a3", {"a": bytes(1000)}, {})
    assert {entry.key for entry in kept.entries()} == {"a1", "a3"}
    assert not kept.write("program", "a4", {"a": bytes(2501)}, {})
    assert {entry.key for entry in kept.entries()} == {"a1", "a3"}


def test_a_write_takes_no_longer_with_more_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are counted once a day, and when the sum of what was written says that something has to go."""
    looks: list[int] = []
    entries = Store.entries
    monkeypatch.setattr(Store, "entries", lambda store: looks.append(1) or entries(store))
    kept = Store(tmp_path, limit=10_000)
    for number in range(40):
        kept.write("trace", f"{number:x}", {"a": bytes(500)}, {})
        assert sum(entry.size for entry in entries(kept)) <= kept.limit
    assert len(looks) <= 1 + (40 * 500 - 10_000) // (10_000 // 16) + 1 and kept.read("trace", f"{39:x}") is not None
    for damaged in ("", "no numbers", "-1 -1", "1"):
        (tmp_path / "room").write_text(damaged)
        before = len(looks)
        kept.write("trace", f"{len(looks):x}abc", {"a": bytes(500)}, {})
        assert len(looks) == before + 1
    left = tmp_path / ".new-left"
    left.mkdir()
    os.utime(left, (1e9, 1e9))
    size, counted = (tmp_path / "room").read_text().split()
    (tmp_path / "room").write_text(f"{size} {int(counted) - 25 * 3600}")  # a day and an hour ago
    kept.write("trace", "abcdef", {"a": bytes(500)}, {})
    assert not left.exists()


def test_clearing(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    (tmp_path / "program-of-the-user").mkdir()
    for key in ("aa1", "aa2", "bb"):
        kept.write("program", key, FILES, {})
    assert kept.clear("aa") == 2 and [entry.key for entry in kept.entries()] == ["bb"]
    assert kept.clear() == 1
    assert sorted(tmp_path.iterdir()) == [tmp_path / "program-of-the-user"]


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    kept = Store(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "csc"):
        assert not kept.write("program", "abc", FILES, {})
    assert "program abc is not kept" in caplog.text
    assert kept.read("program", "abc") is None and kept.entries() == [] and kept.clear() == 0


def _hammer(folder: str, number: int, wrong: object) -> None:
    kept = Store(Path(folder), limit=40_000)
    for turn in range(60):
        key = f"{turn % 4:x}"
        content = {"a": key.encode() * 3000, "b/c": key.encode() * 10}
        kept.write("program", key, content, {})
        found = kept.read("program", key)
        if found is not None and found != content:
            wrong.value += 1  # type: ignore[attr-defined]
        if (turn + number) % 7 == 0:
            kept.clear(key)


def test_several_processes_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("fork")
    wrong = context.Value("i", 0)
    workers = [context.Process(target=_hammer, args=(str(tmp_path), number, wrong)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    assert [worker.exitcode for worker in workers] == [0, 0, 0] and wrong.value == 0
    kept = Store(tmp_path)
    for entry in kept.entries():
        assert kept.read("program", entry.key) == {"a": entry.key.encode() * 3000, "b/c": entry.key.encode() * 10}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("text", "size"), [("500", 500), ("1.5MB", 1_500_000), ("2 g", 2 * 10**9)])
def test_the_environment_decides(text: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store() is None  # as tests/conftest.py says
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_LIMIT", text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = store()
    assert found is not None and (found.folder, found.limit) == (tmp_path / "csc", size)
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path / "own"))
    assert location() == tmp_path / "own"
    monkeypatch.setenv("CSC_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="CSC_CACHE_DIR says the folder"):
        store()
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_LIMIT", "much")
    with pytest.raises(InputError, match="CSC_CACHE_LIMIT is 'much'"):
        store()
