"""Where in the user's code a traced call comes from.

source_of(node) -> "modeling_llama.py:182"
"""

from __future__ import annotations

import re

from torch import fx


def source_of(node: fx.Node) -> str:
    """`modeling_llama.py:182` of the innermost line in the recorded stack; "" if none was recorded."""
    found = re.findall(r'File "([^"\n]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [(f, n) for f, n in found if "/torch/nn/" not in f and "/torch/_" not in f and "/torch/utils/" not in f]
    if not outside:
        return ""
    file, line = outside[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}"
