#!/usr/bin/env bash
# transformers 5.23.0: a model whose forward takes **kwargs and makes a mean of its own is trained by Trainer with
# gradient_accumulation_steps=k on the *sum* of k batch means, k times the gradient of the same samples in one batch;
# the same model without **kwargs gets their mean.
#
# Trainer takes **kwargs for a promise to divide by num_items_in_batch, and leaves its own division by k out. A forward
# that has **kwargs to pass to an encoder, say, and computes F.mse_loss or a cross entropy's mean itself, keeps no such
# promise. Nothing warns; with max_grad_norm the factor goes unseen, with plain SGD the learning rate is k times as large.
#
# Seen with transformers 5.23.0, accelerate 1.15.0, torch 2.13.0, Python 3.11:
#   without kwargs 1.0
#   with kwargs 4.0
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet torch==2.13.0
env/bin/python -m pip install --quiet transformers==5.23.0 accelerate==1.15.0
cat > step.py <<'PYTHON'
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1)

    def forward(self, x, labels):
        return {"loss": F.mse_loss(self.line(x)[:, 0], labels)}


class WithKwargs(Line):
    def forward(self, x, labels, **kwargs):
        return super().forward(x, labels)


def moved(make, size, accumulated):
    """How far one step of SGD moves the weight: 8 samples in `accumulated` batches."""
    model = make()
    before = model.line.weight.detach().clone()
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=size, gradient_accumulation_steps=accumulated, max_steps=1, optim="sgd",
        learning_rate=0.1, max_grad_norm=0.0, lr_scheduler_type="constant", use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=data).train()
    return model.line.weight.detach() - before


torch.manual_seed(1)
data = [{"x": torch.randn(3), "labels": torch.randn(())} for _ in range(8)]
for name, make in (("without kwargs", Line), ("with kwargs", WithKwargs)):
    print(name, round(float(moved(make, 2, 4).norm() / moved(make, 8, 1).norm()), 3))
PYTHON
OMP_NUM_THREADS=1 env/bin/python step.py 2>/dev/null | grep kwargs | tee seen.txt
diff seen.txt - <<'SEEN'
without kwargs 1.0
with kwargs 4.0
SEEN
