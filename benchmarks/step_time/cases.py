"""What is measured: a *case* is a model of one size, a batch, and what of it is frozen.

QUICK, FULL: lists of Case        select(cases, models, only) -> those of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec


@dataclass(frozen=True)
class Case:
    """model: of benchmarks.step_time.models. tokens: of a sample, of which there are two. frozen: "nothing", "encoder",
    "rest" (all but the projector), "lora" or "nf4" (the same on layers in NF4, by bitsandbytes). pp: pipeline ranks,
    all in one process, of csc alone.
    """

    model: str
    width: int
    tokens: int
    layers: int = 4
    padded: bool = True
    frozen: str = "nothing"
    pp: int = 1

    def __str__(self) -> str:
        padded = "padded" if self.padded else "unpadded"
        pipeline = f", pp={self.pp}" if self.pp > 1 else ""
        return (
            f"{self.model} {self.width} x {self.tokens}, {self.layers} layers, {padded}, frozen {self.frozen}{pipeline}"
        )


MULTIMODAL = ("llava", "qwen2.5-vl", "whisper")
HEAD = Case("head", 256, 512, layers=1, padded=False)
SIZES = ((128, 128), (512, 256), (512, 1024), (1024, 512))

QUICK = [
    Case("llama", 128, 128),
    Case("llama", 512, 256),
    Case("llama", 512, 256, padded=False),
    Case("llava", 512, 256, frozen="encoder"),
    HEAD,
]
FULL = [
    *(Case("llama", width, tokens, padded=padded) for width, tokens in SIZES for padded in (True, False)),
    *(Case("llama", 512, 256, frozen="lora", padded=padded) for padded in (True, False)),
    *(
        Case(model, 512, 256, frozen=frozen)
        for model in MULTIMODAL
        for frozen in ("nothing", "encoder", "rest", "lora")
    ),
    *(Case(model, 128, 128, frozen="encoder") for model in MULTIMODAL),
    *(Case("llama", 512, 256, layers=layers) for layers in (16, 32)),
    *(Case(model, 512, 256, frozen="encoder", pp=2) for model in ("llama", "llava")),
    *(Case("llama", 512, tokens, frozen="nf4", padded=False) for tokens in (256, 1024) if find_spec("bitsandbytes")),
    HEAD,
]


def select(cases: Sequence[Case], models: Sequence[str], only: str = "*") -> list[Case]:
    """Those of these models, all if none is named, whose text the glob `only` matches."""
    of_models = [case for case in cases if not models or case.model in models]
    return [case for case in of_models if fnmatch(str(case), only)]
