#!/usr/bin/env bash
# Triton 3.6.0, the one that torch 2.11.0 requires, interprets no kernel with a loop whose bound is a number of the
# kernel's (an argument, or what it has loaded) beside NumPy 2.4: with TRITON_INTERPRET=1 `for i in range(n)` raises
# "only 0-dimensional arrays can be converted to Python scalars". The interpreter keeps each number as an array of one
# entry and makes a Python number of it, which NumPy deprecated in 1.25 and refuses since 2.4. torch and Triton bound
# NumPy not at all, so pip installs the two together. NumPy below 2.4, or Triton 3.7 and later, interpret the kernel.
#
# Seen with torch 2.11.0, Triton 3.6.0, Python 3.11 and 3.12:
#   NumPy 2.4.6: TypeError('only 0-dimensional arrays can be converted to Python scalars')
#   NumPy 2.3.5: 6.0
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet torch==2.11.0 triton==3.6.0
cat > total.py <<'PYTHON'
import warnings

import numpy
import torch
import triton
import triton.language as tl

warnings.simplefilter("ignore")  # NumPy 2.3 still warns


@triton.jit
def total(x, result, n):
    added = 0.0
    for i in range(n):
        added += tl.load(x + i)
    tl.store(result, added)


result = torch.zeros(1)
try:
    total[(1,)](torch.arange(4.0), result, 4)
    told = result.item()
except Exception as error:
    told = str(error)
print(f"NumPy {numpy.__version__}: {told}")
PYTHON
for version in 2.4.6 2.3.5; do
    env/bin/python -m pip install --quiet numpy==$version
    TRITON_INTERPRET=1 env/bin/python total.py
done | tee seen.txt
diff seen.txt - <<'SEEN'
NumPy 2.4.6: TypeError('only 0-dimensional arrays can be converted to Python scalars')
NumPy 2.3.5: 6.0
SEEN
