"""What a user should read, whether or not logging is set up: what goes to the log goes to stderr where nobody listens
to the log.
"""

from __future__ import annotations

import logging
import sys

from torch import nn

from csc.capture.module_tree import describe
from csc.capture.quantised_weights import entries
from csc.passes.freeze import component_of
from csc.runtime.specs import Manifest

log = logging.getLogger("csc")
NAMED = 3  # of the parameters that get no gradient
MANY = 5  # steps that waited


def notice(text: str) -> None:
    """Writes a text to the log, and to stderr where nobody listens to the log. One rank says it for all."""
    log.info("%s", text)
    unlogged(text)


def unlogged(text: str) -> None:
    """Writes a text that the log has already to stderr, where nobody listens to the log."""
    if not log.hasHandlers():
        print(f"csc: {text}", file=sys.stderr, flush=True)


def what_trains(model: nn.Module, manifest: Manifest) -> str:
    """How many of the model's numbers a program gives a gradient, by component; and the names of parameters that should
    train and get none. A tied parameter counts once.
    """
    frozen = set(manifest.frozen)
    reached = {spec.name for spec in manifest.parameters if spec.trainable and spec.reached}
    modules = describe(model)
    counts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        row = counts.setdefault(component_of(name, modules), [0, 0])
        row[0] += entries(parameter) if name in reached else 0
        row[1] += entries(parameter)
    trained, total = (sum(row[place] for row in counts.values()) for place in (0, 1))
    shares = [f"{name}: {_share(*row)}" for name, row in counts.items() if row[0]]
    text = f"{trained:,} of {total:,} parameters train" + (f" ({', '.join(shares)})" if shares else "")
    missed = [name for name, _ in model.named_parameters() if name not in frozen | reached]
    if not missed:
        return f"{text}; each gets a gradient" if shares else text
    more = f" and {len(missed) - NAMED} more" if len(missed) > NAMED else ""
    return f"{text}; the loss of this batch does not depend on {', '.join(missed[:NAMED])}{more}: no gradient"


def _share(trained: int, total: int) -> str:
    return f"all {total:,}" if trained == total else f"{trained:,} of {total:,}"


class NewSizes:
    """Batches whose sizes no program was there for."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def waited(self, seconds: float, steps: int) -> None:
        """Notes that a step, after so many of this model, was compiled for before it could run. A user is told once,
        where that goes on.
        """
        self._seconds.append(seconds)
        if len(self._seconds) == MANY:
            notice(
                f"{MANY} of {steps + 1} steps have waited for a program, {sum(self._seconds):.0f} s in all, since each "
                "size of batches is compiled once. Pad to a few lengths (widths=[...] of csc.compile, or "
                "pad_to_multiple_of of a collator), or let csc.balanced choose them and compile before the first step"
            )


class TriedWidths:
    """Trials of csc.driver.batches."""

    def __init__(self) -> None:
        self._told: set[bool] = set()

    def tried(self, width: int, target: int, why: str) -> None:
        """Tells once that microbatches are padded, and once why they are not. why: not to pad from one to the other, or
        "".
        """
        if bool(why) in self._told:
            log.info("microbatches of %d tokens padded to %d: %s", width, target, why or "the same to rounding")
            return
        self._told.add(bool(why))
        if why:
            notice(
                f"microbatches of {width} tokens are not padded to {target}, to be served by the program of another "
                f"size: {why}. Each size is compiled once; widths=[...] of csc.compile pads all the same"
            )
        else:
            notice(
                f"microbatches of other widths than the example's are padded to a few, those of {width} tokens to "
                f"{target}: tried with eager PyTorch, loss and gradients stay as they are, to rounding. A width is "
                "compiled once; widths=False of csc.compile leaves all as they come"
            )
