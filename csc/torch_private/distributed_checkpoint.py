"""What the `.metadata` of a torch.distributed.checkpoint directory is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo"]

_PUBLIC = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta",
)  # fmt: skip


def allowed() -> Mapping[tuple[str, str], Callable[..., Any]]:
    """By module and name, everything that such a file may name: classes that hold numbers and texts, and torch's dtypes
    and layouts.
    """
    found: dict[tuple[str, str], Any] = {(metadata.__name__, name): getattr(metadata, name) for name in _PUBLIC}
    found[metadata.__name__, "_MEM_FORMAT_ENCODING"] = metadata._MEM_FORMAT_ENCODING
    found[filesystem.__name__, "_StorageInfo"] = StorageInfo
    found["torch", "Size"] = torch.Size
    found["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    found["collections", "OrderedDict"] = dict
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            found[module, name] = PurePath
    found |= {("torch", name): one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
    return found
