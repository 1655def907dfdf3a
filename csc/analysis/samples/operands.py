"""What rules ask of an operand, for following samples: it may be a call, or a plain number."""

from __future__ import annotations

from typing import Any

from torch import fx

from csc.analysis.operators.table import Use, relation
from csc.analysis.samples.propagation import SamplePropagation
from csc.analysis.samples.states import NONE, UNKNOWN, Lost, PartsOfSum, Powers, SampleRows, State, Whole


def of(following: SamplePropagation, value: Any) -> State:
    return following.states[value] if isinstance(value, fx.Node) else Whole()


def number_of(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, fx.Node) else value


def powers_of(state: State) -> Powers:
    return state.powers if isinstance(state, Whole | SampleRows | PartsOfSum) else NONE


def uses_of(node: fx.Node) -> tuple[Use, ...]:
    """Lost for a call of which the table of operators says nothing."""
    found = relation(node)
    if found is None:
        raise Lost(UNKNOWN)
    return found.uses
