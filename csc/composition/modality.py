"""What a composed model knows of each of its modalities, and the batch entries they are read from.

Terms
  keyword   the batch entry that an encoder reads: its own name for it (pixel_values, input_features), or
            `<modality>_<keyword>` for all encoders of which several have the same

    keywords(kinds) -> {modality: keyword}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from csc.composition.encoders import EncoderFamily
from csc.composition.projectors import ProjectorSpec


@dataclass(frozen=True)
class Modality:
    """What a modality is, besides its modules. projector: None for a module of the user's own."""

    name: str
    kind: EncoderFamily
    keyword: str
    placeholder: int
    projector: ProjectorSpec | None
    feature_layer: int | None
    keep_prefix: bool


class Composed(Protocol):
    """What a processor asks of a composed model."""

    modalities: dict[str, Modality]

    def tokens(self, modality: str, shape: Sequence[int]) -> int:
        """How many placeholders one item of this shape needs."""


def keywords(kinds: Mapping[str, EncoderFamily]) -> dict[str, str]:
    """The batch entry of each modality; no two share one."""
    count = Counter(kind.input for kind in kinds.values())
    return {name: kind.input if count[kind.input] == 1 else f"{name}_{kind.input}" for name, kind in kinds.items()}
