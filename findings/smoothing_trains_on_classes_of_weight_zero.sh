#!/usr/bin/env bash
# torch 2.13.0: F.cross_entropy with label_smoothing trains on samples whose class has weight 0. Without smoothing such a
# sample adds nothing; with it, it adds its share of the smoothing term to the sum and 0 to the divisor.
#
# So a weight of 0 is no way to leave samples out (ignore_index is): the loss changes with how many of them there are, and
# has no upper bound as fewer others remain. Parts of a batch cannot be averaged by their weights either: a part that
# holds such samples alone has a sum and no divisor.
#
# Seen with torch 2.13.0, Python 3.11 (two samples of the class that weighs 0, two others):
#   smoothing 0.0: all 0.660334, without those 0.660334, sum over those alone 0.000000
#   smoothing 0.1: all 0.845327, without those 0.677255, sum over those alone 0.336143
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 numpy
cat > loss.py <<'PYTHON'
import torch
from torch.nn import functional as F

torch.manual_seed(0)
logits, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 0, 1, 2])
weight = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
for smoothing in (0.0, 0.1):
    every = F.cross_entropy(logits, labels, weight=weight, label_smoothing=smoothing)
    others = F.cross_entropy(logits[2:], labels[2:], weight=weight, label_smoothing=smoothing)
    alone = F.cross_entropy(logits[:2], labels[:2], weight=weight, label_smoothing=smoothing, reduction="sum")
    print(f"smoothing {smoothing}: all {every:.6f}, without those {others:.6f}, sum over those alone {alone:.6f}")
PYTHON
env/bin/python loss.py 2>/dev/null | tee seen.txt
diff seen.txt - <<'SEEN'
smoothing 0.0: all 0.660334, without those 0.660334, sum over those alone 0.000000
smoothing 0.1: all 0.845327, without those 0.677255, sum over those alone 0.336143
SEEN
