"""How often a dict was written to, as torch's own guards ask."""

from __future__ import annotations

from torch._C._dynamo.guards import dict_version

__all__ = ["dict_version"]  # (dict) -> number: the same one for as long as no key and no value was written
