"""What other sizes of a batch have shown of a capture: what is the same in this size is not traced or proven again.

Terms
  template   csc.ir.program.Template, with its joint graph
  key        all that decides a joint graph: the forward graph in its sizes, the gradients that come in and are wanted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Joints:
    """mode: the FakeTensorMode of all of them. templates: with joint graphs, by key. combinations: how losses combine,
    as proven for every size, by what was assumed of the batch's entries.
    """

    mode: Any
    templates: Mapping[str, Any] = field(default_factory=dict)
    combinations: Mapping[Any, Any] = field(default_factory=dict)
