#!/usr/bin/env bash
# torch 2.13.0: the result of some operations has other strides on the meta device (and in fake tensors, by which
# torch.export and torch.compile trace) than on the CPU, where operands are transposed. So a view that a trace has seen
# to work may raise on real tensors, and one that works on real tensors may raise in the trace.
#
# Each of these has a decomposition or a meta function of its own; operations that go by TensorIterator on both sides
# (add, logaddexp) agree.
#
# Seen with torch 2.13.0, Python 3.11, x of strides (1, 4) and y of strides (3, 1), both (4, 3): the strides on both
# devices, and whether .view(-1) of the result works:
#   add           cpu (1, 4) no    meta (1, 4) no
#   2 ** x        cpu (3, 1) yes   meta (1, 4) no
#   logsigmoid    cpu (3, 1) yes   meta (1, 4) no
#   xlogy         cpu (1, 4) no    meta (3, 1) yes
#   copysign      cpu (1, 4) no    meta (3, 1) yes
#   floor_divide  cpu (1, 4) no    meta (3, 1) yes
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 numpy
cat > strides.py <<'PYTHON'
import torch
from torch.nn import functional as F

OPERATIONS = {
    "add": torch.add,
    "2 ** x": lambda x, y: 2.0**x,
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "xlogy": torch.xlogy,
    "copysign": torch.copysign,
    "floor_divide": torch.floor_divide,
}


def seen(operation, device):
    result = operation(torch.rand(3, 4, device=device).t(), torch.rand(4, 3, device=device))
    try:
        result.view(-1)
    except RuntimeError:
        return f"{device} {result.stride()} no"
    return f"{device} {result.stride()} yes"


for name, operation in OPERATIONS.items():
    print(f"{name:12}  {seen(operation, 'cpu'):14}  {seen(operation, 'meta')}")
PYTHON
env/bin/python strides.py 2>/dev/null | tee seen.txt
diff seen.txt - <<'SEEN'
add           cpu (1, 4) no   meta (1, 4) no
2 ** x        cpu (3, 1) yes  meta (1, 4) no
logsigmoid    cpu (3, 1) yes  meta (1, 4) no
xlogy         cpu (1, 4) no   meta (3, 1) yes
copysign      cpu (1, 4) no   meta (3, 1) yes
floor_divide  cpu (1, 4) no   meta (3, 1) yes
SEEN
