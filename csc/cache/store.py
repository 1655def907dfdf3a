"""The cache's folder: entries that are there whole, or not at all, for any number of processes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csc.errors import InputError
from csc.runtime.loaded_program import checked_file, read_json, within

# --- Whether what lies in the cache is the user's own: the emitted Python files of an entry are run ------------------


OPEN = stat.S_IWGRP | stat.S_IWOTH


def refused(folder: Path) -> str:
    """Of the cache's folder, which may be reached by links of the user's own; "" if it is his, or not there."""
    try:
        status = os.stat(folder)
        link = os.lstat(folder)
    except OSError:
        return ""
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no folder"
    return _owner(link, str(folder)) or _why(status, str(folder))


def refused_within(entry: Path) -> str:
    """Of an entry: of all that is in it, links to other places and what is no plain file included."""
    for path in _all(entry):
        try:
            status = os.lstat(path)
        except OSError:  # it has just been removed
            continue
        name = os.path.relpath(path, entry.parent)
        if not stat.S_ISDIR(status.st_mode) and (path == str(entry) or not stat.S_ISREG(status.st_mode)):
            return f"{name} is {'a symbolic link' if stat.S_ISLNK(status.st_mode) else 'no plain file'}"
        if why := _why(status, name):
            return why
    return ""


def _all(entry: Path) -> Iterator[str]:
    yield str(entry)
    for folder, folders, files in os.walk(entry):
        for name in (*folders, *files):
            yield os.path.join(folder, name)


def _why(status: os.stat_result, name: str) -> str:
    if status.st_mode & OPEN:
        return f"others may write to {name} (chmod -R go-w)"
    return _owner(status, name)


def _owner(status: os.stat_result, name: str) -> str:
    return f"{name} belongs to another user" if status.st_uid != os.geteuid() else ""


# --- The cache's folder: entries that are there whole, or not at all, for any number of processes --------------------
#
# Terms
#   entry      a folder KIND-KEY (a hash, in hexadecimal digits) with files and entry.json, which lists their sizes and
#              hashes. It is built under another name and renamed; a reader checks every file against its hash.
#   damaged    an entry that is not what its entry.json says: it is moved away and counts as missing
#   refused    an entry, or a folder, that somebody else owns or may write to: it is not used, and left as it is
#   used       when it was last read: the time stamp of its entry.json; `hits`: how often, one byte each


log = logging.getLogger("csc")

FORMAT = 1
SHOWN = ("capture", "trace", "program", "mesh")  # what users know of
KINDS = (*SHOWN, "guards", "checked")
INDUCTOR = "inductor"  # what torch's compiler keeps is no entry: a folder for each machine, filled and read by torch
LIMIT = 2 * 10**9  # bytes
ROOM = "room"  # a file: bytes of entries when they were last counted and of those written since; when that was
SPARE = 16  # of the limit this share is left free when something has to go
LEFT_BEHIND = 24 * 3600.0  # seconds after which what a killed process was building is removed
KEY = re.compile(r"[0-9a-f]+(-[0-9a-f]+)?")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Entry:
    """What `csc cache list` shows. used: seconds since the epoch; size: bytes; about: what the writer said of it."""

    kind: str
    key: str
    used: float
    hits: int
    size: int
    about: Mapping[str, Any] = field(default_factory=dict)


def location() -> Path:
    """$CSC_CACHE_DIR, else `csc` in the user's cache folder."""
    folder = os.environ.get("CSC_CACHE_DIR")
    if folder:
        return Path(folder).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "csc"


def store() -> Store | None:
    """The store of this process' environment; None with CSC_CACHE=0. InputError for a limit that is no size, and for a
    path in the place of a switch.
    """
    switch = os.environ.get("CSC_CACHE", "1")
    if switch.lower() in ("0", "false", "off", "no"):
        return None
    if "/" in switch:
        raise InputError(f"CSC_CACHE is {switch!r}", "environment", "CSC_CACHE_DIR says the folder, CSC_CACHE 1 or 0")
    limit = size_in_bytes("CSC_CACHE_LIMIT", os.environ.get("CSC_CACHE_LIMIT", str(LIMIT)), "environment")
    return Store(location(), limit)


def size_in_bytes(name: str, given: int | str, where: str) -> int:
    """A number of bytes, which may be a text such as 2GB. name: what InputError calls what was given, if it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b?\s*", str(given).lower())
    if match is None:
        raise InputError(f"{name} is {given!r}", where, "write bytes, or a size such as 500MB or 2GB")
    return int(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True)
class Store:
    """Entries in a folder, together at most `limit` bytes: the one that was not used for longest goes first."""

    folder: Path
    limit: int = LIMIT
    _said: set[str] = field(default_factory=set, compare=False, repr=False)

    def read(self, kind: str, key: str) -> dict[str, bytes] | None:
        """The files of an entry; None if there is none, or it is damaged or refused. Never an error."""
        place = self._place(kind, key)
        if self._refuses(refused(self.folder) or refused_within(place)):
            return None
        try:
            listed = read_json(place / "entry.json", ValueError)
            if listed["format"] != FORMAT or listed["key"] != key:
                raise ValueError("it is another entry's")
            if _sum(listed) != listed["sum"]:
                raise ValueError("entry.json has changed")
            paths = {name: within(place, name, ValueError) for name in listed["files"]}
            files = {name: checked_file(file, ValueError).read_bytes() for name, file in paths.items()}
            for name, content in files.items():
                if hashlib.sha256(content).hexdigest() != listed["files"][name]["sha256"]:
                    raise ValueError(f"{name} has changed")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if place.exists():
                self.discard(kind, key, str(error))
            return None
        self._used(place)
        return files

    def _refuses(self, why: str) -> bool:
        """Says once why something in the cache is not used."""
        if why and why not in self._said:
            self._said.add(why)
            log.warning("cache: what is there is not used: %s", why)
        return bool(why)

    def discard(self, kind: str, key: str, why: str) -> None:
        """Remove an entry that turned out to be damaged."""
        log.warning("cache: %s %s is damaged (%s); it is made again", kind, key[:12], why)
        self._remove(self._place(kind, key))

    def _used(self, place: Path) -> None:
        with contextlib.suppress(OSError):  # may be read-only, or just removed
            _put(place / "hits", b".", os.O_APPEND)
            os.utime(place / "entry.json")

    def write(self, kind: str, key: str, files: Mapping[str, bytes], about: Mapping[str, Any]) -> bool:
        """Keep files under a key, unless they are there or do not fit. False if not, with a line in the log; no error:
        what could not be kept can still be used.
        """
        size = sum(map(len, files.values()))
        if size > self.limit:
            log.info("cache: %s %s is not kept: %d bytes are more than the limit", kind, key[:12], size)
            return False
        if os.path.lexists(self._place(kind, key)):
            return not self._refuses(refused_within(self._place(kind, key)))
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._refuses(refused(self.folder)):
                return False
            self._write(kind, key, files, about)
            self._make_room(self._place(kind, key), size)
        except OSError as error:
            log.warning("cache: %s %s is not kept: %s", kind, key[:12], error)
            return False
        return True

    def _write(self, kind: str, key: str, files: Mapping[str, bytes], about: Mapping[str, Any]) -> None:
        place = self._place(kind, key)
        building = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            for name, content in files.items():
                (building / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                _put(building / name, content)
            listed: dict[str, Any] = {
                "format": FORMAT, "kind": kind, "key": key, "about": dict(about),
                "files": {n: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()},
            }  # fmt: skip
            listed["sum"] = _sum(listed)
            _put(building / "entry.json", json.dumps(listed).encode())
            os.rename(building, place)
        except OSError:
            shutil.rmtree(building, ignore_errors=True)
            if not place.exists():  # else another process was first
                raise

    def _make_room(self, newest: Path, size: int) -> None:
        """Remove what is over the limit, oldest first, and what killed processes left. Entries are looked at only when
        the sum of what was written says so: it counts what has gone since, too, but takes no longer with more of them.
        """
        with open(os.open(self.folder / ROOM, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
            with contextlib.suppress(OSError):  # a file system without locks: a sum may be lost, which is made up for
                fcntl.flock(file, fcntl.LOCK_EX)
            total, counted = _numbers(file.read())
            total, now = total + size, time.time()
            if total > self.limit or not 0 <= now - counted < LEFT_BEHIND:
                total, counted = self._left(newest), now
            file.seek(0)
            file.truncate()
            file.write(f"{total} {int(counted)}")

    def _left(self, newest: Path) -> int:
        """Bytes of entries, of which so many are removed that the next ones have room without looking again."""
        entries = self.entries()
        total = sum(entry.size for entry in entries)
        wanted = self.limit if total <= self.limit else self.limit - self.limit // SPARE
        for entry in reversed(entries):
            if total > wanted and self._place(entry.kind, entry.key) != newest:
                self._remove(self._place(entry.kind, entry.key))
                total -= entry.size
        for left in (*self.folder.glob(".new-*"), *self.folder.glob(".gone-*")):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > LEFT_BEHIND:
                    shutil.rmtree(left, ignore_errors=True)
        return total

    def _remove(self, place: Path) -> bool:
        """At once for readers: they find it, or nothing. False if another process did."""
        gone = self.folder / f".gone-{uuid.uuid4().hex}"
        try:
            os.rename(place, gone)
        except OSError:
            return False
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def keys(self, kind: str, prefix: str = "") -> list[str]:
        """Keys of a kind that begin so, in order. What else lies in the folder is nobody's business."""
        try:
            names = [entry.name.removeprefix(f"{kind}-") for entry in self.folder.glob(f"{kind}-*") if entry.is_dir()]
        except OSError:
            return []
        return sorted(key for key in names if KEY.fullmatch(key) and key.startswith(prefix))

    def entries(self) -> list[Entry]:
        """All entries, the one used last first. One that cannot be read counts, with what its files take."""
        entries = [entry for kind in KINDS for key in self.keys(kind) if (entry := self._entry(kind, key)) is not None]
        return sorted(entries, key=lambda entry: (-entry.used, entry.kind, entry.key))

    def _entry(self, kind: str, key: str) -> Entry | None:
        place = self._place(kind, key)
        try:
            listed = read_json(place / "entry.json", ValueError)
            used = (place / "entry.json").stat().st_mtime
            size = sum(file["size"] for file in listed["files"].values())
            return Entry(kind, key, used, _size(place / "hits"), size, dict(listed["about"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            size = sum(map(_size, _files(place)))
            return Entry(kind, key, 0.0, 0, size, {"name": "(damaged)"}) if place.exists() else None

    def clear(self, prefix: str = "") -> int:
        """Remove the entries whose keys begin so; all of them without a prefix, and what Inductor has made. How many of
        SHOWN were removed.
        """
        for folder in () if prefix else self.folder.glob(f"{INDUCTOR}-*"):
            self._remove(folder)
        with contextlib.suppress(OSError):
            (self.folder / ROOM).unlink()
        chosen = [(kind, key) for kind in KINDS for key in self.keys(kind, prefix)]
        return sum([self._remove(self._place(kind, key)) and kind in SHOWN for kind, key in chosen])

    def _place(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}-{key}"


def _sum(listed: Mapping[str, Any]) -> str:
    """Of what an entry lists: a file that is no longer listed would not be missed."""
    rest = {key: value for key, value in listed.items() if key != "sum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _numbers(text: str) -> tuple[int, float]:
    """Bytes and seconds of the file ROOM; never counted if it says nothing."""
    try:
        size, counted = map(int, text.split())
        return size, float(counted)
    except ValueError:
        return 0, 0.0


def _put(file: Path, content: bytes, how: int = 0) -> None:
    """Into a file that is the user's alone, whatever new files usually are."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | how, 0o600), "wb") as opened:
        opened.write(content)


def _files(place: Path) -> Iterator[Path]:
    return (file for file in place.rglob("*") if file.is_file())


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
