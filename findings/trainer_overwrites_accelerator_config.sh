#!/usr/bin/env bash
# transformers 5.23.0: Trainer writes into the dict that a caller gave as accelerator_config. A second
# TrainingArguments made with the same dict does not accumulate gradients.
#
# {"gradient_accumulation_kwargs": {"num_steps": 2}} sets gradient_accumulation_steps of the first run to 2. Trainer then
# sets num_steps to 1 for accelerate, as it divides itself, in the caller's own nested dict. A sweep that makes its
# arguments from one dict trains its first run with two batches a step and all others with one.
#
# Seen with transformers 5.23.0, accelerate 1.15.0, torch 2.13.0, Python 3.11:
#   first run accumulates 2, the dict is now {'gradient_accumulation_kwargs': {'num_steps': 1}}
#   second run accumulates 1, the dict is now {'gradient_accumulation_kwargs': {'num_steps': 1}}
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet torch==2.13.0
env/bin/python -m pip install --quiet transformers==5.23.0 accelerate==1.15.0
cat > runs.py <<'PYTHON'
from torch import nn
from transformers import Trainer, TrainingArguments

config = {"gradient_accumulation_kwargs": {"num_steps": 2}}
for run in ("first", "second"):
    arguments = TrainingArguments("out", accelerator_config=config, report_to=[], use_cpu=True)
    Trainer(nn.Linear(1, 1), arguments)
    print(f"{run} run accumulates {arguments.gradient_accumulation_steps}, the dict is now {config}")
PYTHON
OMP_NUM_THREADS=1 env/bin/python runs.py 2>/dev/null | grep accumulates | tee seen.txt
diff seen.txt - <<'SEEN'
first run accumulates 2, the dict is now {'gradient_accumulation_kwargs': {'num_steps': 1}}
second run accumulates 1, the dict is now {'gradient_accumulation_kwargs': {'num_steps': 1}}
SEEN
