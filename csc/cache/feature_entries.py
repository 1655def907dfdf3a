"""Features of frozen encoders on disk: files of safetensors that are there whole, or not at all.

Terms
  entry      a file DIRECTORY/xx/KEY.safetensors, written under another name and renamed; its header has the hash of key
             and tensors, which every reader compares
  damaged    an entry that is not what its header says: it is removed, and counts as missing
  full       `limit` bytes lie in the directory: then nothing more is kept, and nothing is removed, since in every epoch
             what was written first is wanted first

Any number of processes may share a directory, and any number of models: keys say of what features are.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from csc.cache.store import size_in_bytes
from csc.errors import InputError
from csc.runtime.loaded_program import checked_file
from csc.runtime.weights import bytes_of, with_own_memory

log = logging.getLogger("csc")

LIMIT = 100 * 10**9  # bytes
LOOK_AGAIN = 0.02  # of the limit: after so much of its own a process looks what others have written meanwhile
LEFT_BEHIND = 24 * 3600.0  # seconds after which what a killed process was writing is removed
HASH = "sha256"
NEW = ".new-"


class FeatureCache:
    """A directory of features of frozen encoders, for `csc.compile(..., cache_features=...)`.

    Args:
        directory: Where the entries lie. Processes and models may share it.
        limit: The most bytes that all entries take, as a number or as "400GB". A full directory takes no more entries
            and loses none.

    Raises:
        InputError: The limit is no positive size.
    """

    def __init__(self, directory: str | Path, limit: int | str = LIMIT) -> None:
        """limit: bytes, or as "200GB". InputError if it is neither."""
        self.directory = Path(directory).expanduser().resolve()
        self.limit = size_in_bytes("limit", limit, "FeatureCache")
        self._there: int | None = None  # bytes, as far as known
        self._own = 0  # bytes written since that was seen
        self._said = False

    def read(self, key: str) -> dict[str, torch.Tensor] | None:
        """The tensors of an entry; None if there is none, or it is damaged."""
        file = self._file(key)
        if not file.exists():
            return None
        try:
            checked_file(file, OSError)
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                if (opened.metadata() or {}).get(HASH) != _hash(key, tensors):
                    raise ValueError("its content is not what was written")
        except (OSError, ValueError, SafetensorError) as error:
            log.warning("features: %s is damaged (%s); it is made again", file, error)
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        return tensors

    def write(self, key: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Keep tensors under a key, unless the directory is full or cannot be written: then a line in the log says so,
        and what could not be kept can still be used.
        """
        file = self._file(key)
        if file.exists():
            return True
        dense = {name: with_own_memory(tensor) for name, tensor in tensors.items()}
        content = save(dense, {HASH: _hash(key, dense)})
        if not self._has_room(len(content)):
            return False
        building = file.parent / f"{NEW}{uuid.uuid4().hex}"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            building.write_bytes(content)
            os.replace(building, file)
        except OSError as error:
            with contextlib.suppress(OSError):
                building.unlink()
            self._say("features are not kept: %s", error)
            return False
        self._own += len(content)
        return True

    def _has_room(self, size: int) -> bool:
        if self._there is None or self._own > LOOK_AGAIN * self.limit:
            self._there, self._own = self._size(), 0
        if self._there + self._own + size <= self.limit:
            return True
        self._say(
            "features: %s is full (%.3g GB), and no more are kept: raise the limit, or remove what other models left",
            self.directory, self.limit / 1e9,
        )  # fmt: skip
        return False

    def _size(self) -> int:
        """Bytes of all that lies there; what killed processes left is removed."""
        total, now = 0, time.time()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"features cannot be kept there ({error})", str(self.directory), "name a directory that can be made"
            ) from None
        for folder in filter(os.DirEntry.is_dir, os.scandir(self.directory)):
            for entry in os.scandir(folder):
                with contextlib.suppress(OSError):
                    if entry.name.startswith(NEW) and now - entry.stat().st_mtime > LEFT_BEHIND:
                        os.unlink(entry)
                    else:
                        total += entry.stat().st_size
        return total

    def _say(self, text: str, *arguments: object) -> None:
        if not self._said:
            self._said = True
            log.warning(text, *arguments)

    def _file(self, key: str) -> Path:
        return self.directory / key[:2] / f"{key}.safetensors"


def _hash(key: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Of the key too: a file under another one's name is damaged."""
    digest = hashlib.sha256(key.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
