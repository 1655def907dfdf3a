"""The architectures: what transformers registers for causal LM, image and audio text models, and seq2seq.

architectures() -> {name: Architecture}      each class once, in the order of transformers' tables
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers
from transformers.models.auto import modeling_auto as tables
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


@dataclass(frozen=True)
class Architecture:
    """kind: the type of its config, as the tables of transformers name it."""

    name: str
    task: str
    kind: str

    @property
    def model_class(self) -> Any:
        """The class to train; transformers imports it here."""
        return getattr(transformers, self.name)

    @property
    def config_class(self) -> Any:
        """The config that the tables give; the class' own where they differ."""
        own = getattr(self.model_class, "config_class", None)
        return own or CONFIG_MAPPING[self.kind]


def architectures() -> dict[str, Architecture]:
    """By the class' name."""
    found: dict[str, Architecture] = {}
    for task, table in TASKS.items():
        for kind, names in getattr(tables, table, {}).items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, Architecture(name, task, kind))
    return found
