"""Every argument of the installed transformers' Trainer has a line, and pages say the same."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from csc.errors import InputError
from csc.integrations import trainer_arguments
from csc.integrations.trainer_arguments import ACCELERATOR, FIELDS, MAPPED, REFUSED, check, table
from csc.ir.mesh import Mesh
from csc.ir.program import Options

PINNED = "5.23"  # of constraints.txt; others may have more or fewer
ROOT = Path(__file__).parents[2]


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(directory), report_to="none", use_cpu=True, **changes)


def looked_at(args: TrainingArguments, mesh: Mesh | None = None, processes: int = 1, **options: Any) -> None:
    check(args, Options(mesh=mesh or Mesh(), **options), nn.Linear(1, 1), processes)


@pytest.mark.skipif(not transformers.__version__.startswith(PINNED), reason=f"the table is of transformers {PINNED}")
def test_every_argument_has_a_line() -> None:
    assert {one.name for one in fields(TrainingArguments)} == set(FIELDS)
    assert {one.name for one in fields(AcceleratorConfig)} == set(ACCELERATOR)


def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs" / "trainer-arguments.md").read_text()
    assert table(FIELDS) in page and table(ACCELERATOR) in page


def test_defaults_are_taken(tmp_path: Path) -> None:
    looked_at(arguments(tmp_path), Mesh(dp=2), processes=2)


CHANGED = {
    "auto_find_batch_size": True, "label_smoothing_factor": 0.1, "fp16": True,
    "torch_compile": True, "bf16_full_eval": True, "fp16_full_eval": True,
    "optim_target_modules": "all", "debug": "underflow_overflow", "liger_kernel_config": {"rope": True},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    assert FIELDS[name].kind == REFUSED
    with pytest.raises(InputError, match=f"{name} is set, which the compiled program knows nothing of"):
        looked_at(arguments(tmp_path, **{name: CHANGED[name]}), Mesh(), processes=1)


MADE_FOR = {
    "bf16": (True, "the compiled model computes in the dtypes of its parameters"),
    "gradient_checkpointing": (True, "the model was compiled without recompute="),
    "neftune_noise_alpha": (5.0, "the compiled model's embeddings have no noise"),
}


@pytest.mark.parametrize("name", sorted(MADE_FOR))
def test_what_a_model_was_not_compiled_for(name: str, tmp_path: Path) -> None:
    value, message = MADE_FOR[name]
    assert FIELDS[name].kind == MAPPED
    with pytest.raises(InputError, match=f"{name} is .*{message}.*compile_for"):
        looked_at(arguments(tmp_path, **{name: value}))


def test_an_option_of_the_compilation_says_the_same(tmp_path: Path) -> None:
    both = arguments(tmp_path, bf16=True, gradient_checkpointing=True)
    looked_at(both, precision="bf16", recompute=(("*", "selective"),))
    with pytest.raises(InputError, match="without recompute="):
        looked_at(both, precision="bf16", recompute=(("*", "none"),))


def test_what_a_launcher_says_of_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch --mixed_precision` says it in the environment."""
    for precision, message in {"bf16": "bf16 is set", "fp16": "mixed_precision is fp16"}.items():
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        with pytest.raises(InputError, match=message):
            looked_at(arguments(tmp_path))


@pytest.mark.parametrize(
    ("changes", "mesh", "processes", "message"),
    [
        ({"optim": "galore_adamw"}, Mesh(), 1, "optim=galore_adamw wants the model itself"),
        ({"average_tokens_across_devices": False}, Mesh(dp=2), 1, "average_tokens_across_devices is False"),
        ({"save_on_each_node": True}, Mesh(), 2, "save_on_each_node is set, with 2 processes"),
        ({"train_sampling_strategy": "batch_rebalance"}, Mesh(), 2, "divides among processes"),
        ({"accelerator_config": {"dispatch_batches": True}}, Mesh(), 2, "dispatch_batches"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, Mesh(), 2, "use_seedable_sampler=False"),
    ],
)
def test_refused_where_they_would_change_a_number(
    changes: dict[str, Any], mesh: Mesh, processes: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        looked_at(arguments(tmp_path, **changes), mesh, processes)
    if processes == 2:
        looked_at(arguments(tmp_path, **changes), mesh, 1)


def test_an_argument_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers to come: an error if it is set, and no word about its default."""
    known = {name: one for name, one in FIELDS.items() if name not in {"weight_decay", "remove_unused_columns"}}
    monkeypatch.setattr(trainer_arguments, "FIELDS", known)
    looked_at(arguments(tmp_path), Mesh(), processes=1)
    with pytest.raises(InputError, match=r"weight_decay is set, an argument of transformers .* that csc does not know"):
        looked_at(arguments(tmp_path, weight_decay=0.1), Mesh(), processes=1)
    with pytest.raises(InputError, match="remove_unused_columns is set, an argument"):
        looked_at(arguments(tmp_path, remove_unused_columns=False), Mesh(), processes=1)
