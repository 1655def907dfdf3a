"""The position of a data loader, kept with a checkpoint: each share of the samples has its own.

Terms: a loader *says its position* with state_dict() and goes there with load_state_dict(state), as torchdata's
StatefulDataLoader does. The file of share d of n is loader_D_of_N.pt; it is read without unpickling objects.

    check(loader)                            InputError if it does neither
    write(loader, directory, place)          read(directory, place) -> state        place: (dp_rank, dp_size)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from csc.errors import InputError
from csc.runtime.meeting import first_line
from csc.runtime.weights import published

ANY_SHARE = "position_of_all_shares"  # of a loader whose position is the same for whatever dp
_FILE = re.compile(r"loader_(\d+)_of_(\d+)\.pt")


@dataclass(frozen=True)
class Prefetched:
    """A loader of which more was fetched than was trained on: it says the position of what was."""

    loader: Any
    position: Any

    def state_dict(self) -> Any:
        return self.position

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    @property
    def position_of_all_shares(self) -> bool:
        return bool(getattr(self.loader, ANY_SHARE, False))


def check(loader: Any) -> None:
    """InputError for a loader that cannot say where it is."""
    if not all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        raise InputError(
            f"a {type(loader).__name__} cannot say at which sample it is", "loader",
            "use torchdata.stateful_dataloader.StatefulDataLoader in its place, or anything with state_dict() and "
            "load_state_dict()",
        )  # fmt: skip


def write(loader: Any, directory: str | Path, place: tuple[int, int]) -> None:
    """The file appears whole or not at all."""
    state = loader.state_dict()
    published(_file(directory, place), lambda path: torch.save(state, path))


def read(directory: str | Path, place: tuple[int, int]) -> Any:
    """The state. InputError if there is no position for this share."""
    file = _file(directory, place)
    if not file.is_file():
        found = sorted(path.name for path in Path(directory).glob("loader_*.pt") if _FILE.fullmatch(path.name))
        what = f"the positions there are {', '.join(found)}" if found else "no position of a loader was saved there"
        raise InputError(
            f"{what}, and this process loads share {place[0]} of {place[1]}", str(directory),
            "resume with the dp that it was saved with, or load without loader= and start at the data's beginning",
        )  # fmt: skip
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged file torch says all kinds of things
        raise InputError(
            f"it holds no position of a loader: {first_line(error)}", str(file), "resume from another checkpoint"
        ) from error


def _file(directory: str | Path, place: tuple[int, int]) -> Path:
    return Path(directory) / f"loader_{place[0]}_of_{place[1]}.pt"
