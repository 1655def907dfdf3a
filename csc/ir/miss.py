"""Why a capture is not for a batch: the one assumption that does not hold, with what was assumed and what is there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Miss:
    """what: of the batch, in the words of its entries, such as `input_ids.shape[1]`."""

    what: str
    assumed: str
    found: str

    def __str__(self) -> str:
        return f"{self.what} is {self.found}, and was assumed to be {self.assumed}"
