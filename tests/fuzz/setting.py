"""How csc is asked to train a random model: mesh, microbatches, schedule, precision, what is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from benchmarks.judge import PLAIN, WRITTEN

SCHEDULES = ("auto", "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "interleaved-zb", "zb-h1", "zb-h2", "zb-v")
FROZEN = (
    ("embed.*",), ("head.*",), ("*.bias",), ("*.weight",), ("*part0*",), ("*part1*", "*part2*"), ("encoder.*",),
    ("*encoder*", "*part0*", "embed.*"), ("*.a.*",), ("*.b.*", "*.qkv.*"), ("*part*",), ("projector.*", "*part2*"),
)  # fmt: skip
RECOMPUTE = ("full", "selective")
# Each kind of microbatch alone, then both; both at once; a sample without tokens; a microbatch without labels.
FORMS = (
    ("first", "second", "both"), ("second", "first", "both"), ("second", "first", "turned"), ("first", "both"),
    ("both",), ("both", "turned", "both"), ("plain", "single", "both"), ("first", "hollow"),
    ("second", "ignored", "both"), ("plain", "ignored"), ("first", "first"),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The judge's PLAIN, field by field."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    microbatches: int = 1
    schedule: str = "auto"
    recompute: str | None = None
    precision: str | None = None
    freeze: tuple[str, ...] = ()
    off: bool = False
    steps: bool = False
    accumulate: int = 1
    replaced: bool = False
    evaluate: bool = False
    loss_chunk: int = 0
    own: tuple[tuple[str, int], ...] = ()
    forms: tuple[str, ...] = ()
    written: str = ""
    moved: bool = False
    listed: bool = False
    zero: int = 0
    ahead: bool = False

    def simpler(self) -> Iterator[Setting]:
        """Settings with one thing less."""
        for name in self.changed:
            yield replace(self, **{name: PLAIN[name]})
        if self.pp == 3:
            yield replace(self, pp=2)
        for place in range(len(self.forms)):
            yield replace(self, forms=self.forms[:place] + self.forms[place + 1 :])

    @property
    def changed(self) -> dict[str, Any]:
        """What is asked for besides the plain."""
        return {name: value for name, value in asdict(self).items() if value != PLAIN[name]}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.changed.items()) or "plain"


def random_setting(random: Random, encoder: bool, listed: bool = False) -> Setting:
    """pp of 1 to 3, dp, cp and tp of 1 to 2; at most 12 ranks, but for an encoder on more. encoder: if there is one.
    listed: lists of microbatches of several lengths say how each counts.
    """
    pp, steps = random.choice([1, 2, 2, 3]), random.random() < 0.25
    dp, cp = random.choice([1, 1, 1, 2]), random.choice([1, 1, 1, 2])
    tp = random.choice([1, 1, 2]) if pp * dp * cp <= 6 else 1
    setting = Setting(
        pp=pp,
        dp=dp,
        cp=cp if pp * dp < 6 else 1,
        microbatches=random.choice([1, 1, 2, 2, 4]) if dp == 1 else random.choice([1, 2]),
        schedule=random.choice(SCHEDULES) if random.random() < 0.4 else "auto",
        recompute=random.choice(RECOMPUTE) if random.random() < 0.2 else None,
        precision="bf16" if random.random() < 0.1 else None,
        freeze=random.choice(FROZEN) if random.random() < 0.45 else (),
        off=random.random() < 0.3,
        steps=steps,
        accumulate=random.choice([1, 1, 1, 1, 2]),
        replaced=steps and random.random() < 0.2,
        evaluate=random.random() < 0.15,
        tp=tp,
        loss_chunk=random.choice([1, 3, 8]) if random.random() < 0.3 else 0,
        own=_own(random, pp, dp, tp) if encoder and random.random() < 0.6 else (),
    )
    return _of_several_steps(random, setting, encoder, listed) if random.random() < 0.6 else setting


def _of_several_steps(random: Random, setting: Setting, encoder: bool, listed: bool) -> Setting:
    """A setting with batches of several forms, and with changes between its steps."""
    forms = random.choice(FORMS)
    several, ahead = len(forms) > 1, encoder and setting.pp > 1 and random.random() < 0.15
    return replace(
        setting,
        forms=forms,
        steps=setting.steps and len(forms) == 3,
        replaced=setting.replaced and len(forms) == 3,
        written=random.choice(list(WRITTEN)) if several and random.random() < 0.3 else "",
        moved=several and random.random() < 0.5,
        listed=listed and random.random() < 0.25,
        zero=random.choice([2, 3]) if setting.dp > 1 and random.random() < 0.3 else 0,
        ahead=ahead,
        freeze=("encoder.*",) if ahead else setting.freeze,
    )


def _own(random: Random, pp: int, dp: int, tp: int) -> tuple[tuple[str, int], ...]:
    """What the mesh has for the encoder: fewer replicas or more, whole weights beside a divided model, a stage."""
    found = {"encoder.tp": 1} if tp > 1 and random.random() < 0.7 else {}
    if pp > 1:
        found["encoder.pp"] = 1
        ranks = [1, dp, 2 * dp, dp * tp // found.get("encoder.tp", tp)]
        found["encoder.dp"] = random.choice(ranks)
    return tuple(found.items())
