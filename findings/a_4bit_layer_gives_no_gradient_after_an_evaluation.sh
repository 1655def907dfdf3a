#!/usr/bin/env bash
# bitsandbytes 0.50.2 (torch 2.13.0, CPU with AVX512-BF16): once a Linear4bit was called in eval mode under no_grad, it
# gives its input no gradient any more, in train mode neither. That call repacks the weight for inference, and the
# product of packed weights is no function that autograd knows: beside a warning of PyTorch's at most, `.grad` of the
# input stays None. So whatever trains in front of such layers (LoRA of earlier layers, a projector before a frozen
# language model) stops training after the first evaluation of a loop that trains, evaluates and trains on. Asking the
# layer for its state_dict() unpacks the weight in place, and the gradient is there again.
#
# Seen on such a processor, norms of the gradient of the input (NF4, 256 x 256, bfloat16):
#   train mode: above 0    eval mode: above 0    after a call in eval mode under no_grad, eval mode: None    train: None
#   train mode, after state_dict(): above 0
set -euo pipefail
grep -q avx512_bf16 /proc/cpuinfo || { echo "this processor has no AVX512-BF16: bitsandbytes packs nothing on it"; exit 0; }
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 numpy
env/bin/python -m pip install --quiet bitsandbytes==0.50.2
cat > packed.py <<'PYTHON'
import warnings

import bitsandbytes
import torch

warnings.simplefilter("ignore")
torch.manual_seed(0)
linear = bitsandbytes.nn.Linear4bit(256, 256, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
linear.weight = bitsandbytes.nn.Params4bit(torch.randn(256, 256), requires_grad=False, quant_type="nf4")
linear = linear.to("cpu")


def gradient(layer):
    x = torch.ones(4, 256, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    return None if x.grad is None else float(x.grad.float().norm())


before = gradient(linear.train()), gradient(linear.eval())
with torch.no_grad():
    linear.eval()(torch.ones(4, 256, dtype=torch.bfloat16))
after = gradient(linear.eval()), gradient(linear.train())
linear.state_dict()
again = gradient(linear)
print("bitsandbytes", bitsandbytes.__version__, "torch", torch.__version__)
print("train, eval:", before)
print("after a call in eval mode under no_grad, eval, train:", after)
print("after state_dict(), train:", again)
assert all(before) and after == (None, None) and again
PYTHON
env/bin/python packed.py
