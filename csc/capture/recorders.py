"""The hooks with which models of transformers keep what their layers return.

The first forward that is asked for hidden states puts them in place; they look at what passes and compute nothing.

    is_recorder(hook) -> bool
    only_records(name, before, after) -> bool        whether an attribute of a module changed by such hooks alone
"""

from __future__ import annotations

from typing import Any

MODULES = {"transformers.utils.output_capturing"}  # whose functions record
INSTALLED = "_output_capturing_hooks_installed"  # the attribute that says that they are in place


def is_recorder(hook: Any) -> bool:
    """See the module."""
    return getattr(hook, "__module__", "") in MODULES


def only_records(name: str, before: Any, after: Any) -> bool:
    """See the module. before, after: the values of the attribute."""
    if name == INSTALLED:
        return True
    if name != "_forward_hooks" or not isinstance(before, dict) or not isinstance(after, dict):
        return False
    kept = all(after.get(key) is hook for key, hook in before.items())
    return kept and all(is_recorder(hook) for key, hook in after.items() if key not in before)
