"""A compiled model in HF's Trainer, in Lightning and in a plain loop: the same losses and the same parameters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding, BatchFeature, Trainer, TrainerCallback, TrainingArguments, get_scheduler

import csc
from csc.errors import InputError
from csc.integrations.hf import CompiledTrainer
from tests import launching
from tests.compiler.peft_models import llama, peft_model, text_batch
from tests.models import captions
from tests.tiers import long

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("traces")]

ROWS, STEPS, RATE, NORM = 4, 4, 1e-2, 0.5
Samples = list[dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def base() -> csc.CompiledModel:
    return csc.compile(llama(), mesh="pp=2", example=text_batch(ROWS), microbatches=2)


@pytest.fixture
def fresh(base: csc.CompiledModel) -> Callable[[], csc.CompiledModel]:
    """The compiled model with the parameters that it had at first."""
    first = {name: tensor.clone() for name, tensor in llama().state_dict().items()}

    def make() -> csc.CompiledModel:
        base.model.load_state_dict(first)
        base.zero_grad()
        base.model.train()  # an evaluation may have been its last use
        return base

    return make


def samples(steps: int = STEPS) -> Samples:
    whole = text_batch(ROWS * steps)
    return [{name: tensor[row] for name, tensor in whole.items()} for row in range(ROWS * steps)]


def collate(rows: Samples) -> BatchEncoding:
    """What an HF processor gives."""
    return BatchEncoding({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


def batches(rows: int = ROWS) -> list[BatchEncoding]:
    every = samples()
    return [collate(every[start : start + rows]) for start in range(0, len(every), rows)]


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def loop(
    compiled: csc.CompiledModel, steps: list[Any], total: int | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A plain loop: torch.optim, HF's scheduler, gradient clipping. total: steps of the schedule."""
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=RATE, weight_decay=0.0)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=total or len(steps))
    losses = []
    for batch in steps:
        losses.append(float(compiled.train_step(batch)))
        compiled.clip_grad_norm_(NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, parameters(compiled.model)


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen += [logs["loss"]] if "loss" in logs else []


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    settings = {
        "per_device_train_batch_size": ROWS, "num_train_epochs": 1, "learning_rate": RATE, "max_grad_norm": NORM,
        "lr_scheduler_type": "linear", "warmup_steps": 1, "logging_steps": 1, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "optim": "adamw_torch", "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(str(directory), **{**settings, **changes})


def test_a_loop_takes_what_processors_give(fresh: Callable[[], csc.CompiledModel]) -> None:
    expected = loop(fresh(), [dict(batch) for batch in batches()])
    losses, trained = loop(fresh(), [BatchFeature(dict(batch)) for batch in batches()])
    assert losses == expected[0] and same(trained, expected[1])
    assert not same(trained, parameters(llama()))


def test_hf_trainer_does_what_a_loop_does(fresh: Callable[[], csc.CompiledModel], tmp_path: Path) -> None:
    expected, trained = loop(fresh(), batches())
    log = Losses()
    trainer = CompiledTrainer(
        fresh(), arguments(tmp_path), train_dataset=samples(), data_collator=collate, callbacks=[log]
    )
    trainer.train()
    assert log.seen == pytest.approx(expected, abs=1e-6)  # the Trainer rounds what it logs
    assert same(parameters(trainer.compiled.model), trained)
    evaluated = trainer.evaluate(samples()[:ROWS])  # by the eager model, with what was trained
    with torch.no_grad():
        assert evaluated["eval_loss"] == pytest.approx(float(trainer.compiled.model(**batches()[0]).loss), rel=1e-5)


def test_hf_trainer_agrees_with_its_eager_self(fresh: Callable[[], csc.CompiledModel], tmp_path: Path) -> None:
    """With accumulation over batches of unequal numbers of labels, which the Trainer weights by tokens."""
    change = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    logs = Losses(), Losses()
    eager = Trainer(
        llama(), arguments(tmp_path, **change), train_dataset=samples(), data_collator=collate, callbacks=[logs[0]]
    )
    eager.train()
    compiled = fresh()
    CompiledTrainer(
        compiled, arguments(tmp_path, **change), train_dataset=samples(), data_collator=collate, callbacks=[logs[1]]
    ).train()
    assert len(logs[0].seen) == STEPS and logs[1].seen == pytest.approx(logs[0].seen, abs=1e-4)
    for name, parameter in eager.model.named_parameters():
        torch.testing.assert_close(compiled.model.get_parameter(name), parameter, rtol=1e-3, atol=1e-4)


def test_hf_trainer_resumes(fresh: Callable[[], csc.CompiledModel], tmp_path: Path) -> None:
    def trainer(compiled: csc.CompiledModel) -> CompiledTrainer:
        changes = {"save_strategy": "steps", "save_steps": 2}
        return CompiledTrainer(compiled, arguments(tmp_path, **changes), train_dataset=samples(), data_collator=collate)

    whole = trainer(fresh())
    whole.train()
    expected = parameters(whole.compiled.model)
    again = trainer(fresh())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(parameters(again.compiled.model), expected)
    saved = type(whole.compiled.model).from_pretrained(tmp_path / "checkpoint-4")
    assert same(parameters(saved), expected)
    for file in (tmp_path / "checkpoint-4").glob("model*"):  # as a second save to checkpoint-2 that was cut off
        shutil.copy(file, tmp_path / "checkpoint-2")
    third = trainer(fresh())
    with pytest.raises(InputError, match=r"checkpoint-2: its weights are not those that training_state was saved b"):
        third.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not same(parameters(third.compiled.model), expected)


def uneven(count: int = ROWS * STEPS) -> Samples:
    """Texts of other lengths, which end in what does not count."""
    return [
        {name: tensor[: len(tensor) - row % 4].clone() for name, tensor in one.items()}
        for row, one in enumerate(samples(count // ROWS))
    ]


def padded(rows: Samples) -> BatchEncoding:
    """To a multiple of 4."""
    width = -(-max(len(row["labels"]) for row in rows) // 4) * 4

    def row(one: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        return nn.functional.pad(one[name], (0, width - len(one[name])), value=-100 if name == "labels" else 0)

    return BatchEncoding({name: torch.stack([row(one, name) for one in rows]) for name in rows[0]})


def test_hf_trainer_balances_and_resumes(fresh: Callable[[], csc.CompiledModel], tmp_path: Path) -> None:
    """As a loop over the loader; what is resumed in the middle of an epoch sees the steps that are left."""
    data = uneven()
    balance = {"lengths": [len(one["labels"]) for one in data], "multiple": 4}
    changes = {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}
    own = csc.balanced(
        data, fresh(), batch_size=ROWS, collate=padded, shuffle=True, seed=arguments(tmp_path).seed, **balance
    )
    expected, trained = loop(fresh(), list(own))
    log = Losses()

    def trainer() -> CompiledTrainer:
        return CompiledTrainer(
            fresh(), arguments(tmp_path, **changes), balance=balance, train_dataset=data, data_collator=padded,
            callbacks=[log],
        )  # fmt: skip

    whole = trainer()
    whole.train()
    assert log.seen == pytest.approx(expected, abs=1e-6)
    assert same(parameters(whole.compiled.model), trained)
    again = trainer()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(parameters(again.compiled.model), trained)
    with pytest.raises(InputError, match="gradient_accumulation_steps is 2, and balance divides one batch"):
        CompiledTrainer(fresh(), arguments(tmp_path, gradient_accumulation_steps=2), balance=balance)


def test_lightning_takes_a_balanced_loader(fresh: Callable[[], csc.CompiledModel], tmp_path: Path) -> None:
    data = uneven()
    compiled = fresh()
    loader = csc.balanced(
        data, compiled, lengths=lambda i: len(data[i]["labels"]), batch_size=ROWS, collate=padded, multiple=4
    )
    expected, trained = loop(compiled, list(loader))
    loader.set_epoch(7)  # in order: the same steps
    losses, trainer = with_lightning(fresh(), tmp_path, loader=loader)
    assert losses == expected and same(parameters(trainer.lightning_module.model), trained)


@pytest.mark.long
def test_hf_trainer_resumes_adapters(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
    compiled = csc.compile(peft_model("llama"), mesh="pp=2", example=text_batch(2))
    first = parameters(compiled.model)
    made = {"train_dataset": samples(1), "data_collator": collate}
    CompiledTrainer(compiled, arguments(tmp_path, **changes), **made).train()
    expected = parameters(compiled.model)
    assert not same(expected, first)
    compiled.model.load_state_dict(first)
    again = CompiledTrainer(compiled, arguments(tmp_path, **changes), **made)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(parameters(compiled.model), expected)
    assert same(parameters(PeftModel.from_pretrained(llama(), str(tmp_path / "checkpoint-2"))), expected)


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "zero"), [("pp=2", 0), long("dp=2", 1), ("dp=2", 3)])
@pytest.mark.long_cases("dp=2-3")
def test_hf_trainer_on_two_processes(
    fresh: Callable[[], csc.CompiledModel], mesh: str, zero: int, tmp_path: Path
) -> None:
    """Shuffled batches, saved and resumed halfway: what one process does, to the bit. Replicas load their shares, and
    step their shards.
    """
    from tests.compiler import trainer_worker  # which imports this file

    launching.ranks(trainer_worker.main, 2, tmp_path, mesh, zero)
    found = json.loads((tmp_path / "result.json").read_text())
    log = Losses()
    alone = CompiledTrainer(
        fresh(), arguments(tmp_path, train_sampling_strategy="random"), train_dataset=samples(), data_collator=collate,
        callbacks=[log],
    )  # fmt: skip
    alone.train()
    bits = mesh == "pp=2"  # two replicas add up their gradients in another order
    assert found["losses"] == (log.seen if bits else pytest.approx(log.seen, abs=2e-4))
    saved = parameters(type(alone.compiled.model).from_pretrained(tmp_path / "checkpoint-4"))
    if bits:
        assert same(saved, parameters(alone.compiled.model))
    for name, parameter in alone.compiled.model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-3, atol=1e-4)
    assert found["evaluated"] == pytest.approx(alone.evaluate(samples()[:ROWS])["eval_loss"], rel=1e-5)
    resumed = Losses()
    again = CompiledTrainer(
        fresh(), arguments(tmp_path / "again", train_sampling_strategy="random"), train_dataset=samples(),
        data_collator=collate, callbacks=[resumed],
    )  # fmt: skip
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # in one process, at another mesh
    assert resumed.seen == (log.seen[2:] if bits else pytest.approx(found["losses"][2:], abs=2e-5))


def test_logs_carry_rates(fresh: Callable[[], csc.CompiledModel], tmp_path: Path) -> None:
    trainer = CompiledTrainer(fresh(), arguments(tmp_path), train_dataset=samples(), data_collator=collate)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["step_tokens_per_second"] > 0 and logged["step_samples_per_second"] > 0 and "grad_norm" in logged
    assert trainer.compiled.metrics["samples"] == ROWS and trainer.compiled.metrics["grad_norm"] > 0


def test_what_the_trainer_must_not_do(fresh: Callable[[], csc.CompiledModel], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(activation|gradient)_checkpointing is set"):
        CompiledTrainer(fresh(), arguments(tmp_path, gradient_checkpointing=True))
    with pytest.raises(InputError, match="the loss is part of the compiled program"):
        CompiledTrainer(fresh(), arguments(tmp_path), compute_loss_func=lambda *_: None)


def test_a_model_that_encodes_ahead_is_refused(tmp_path: Path) -> None:
    """Neither says which batch follows, so nothing would be ahead."""
    from csc.integrations.lightning import CompiledModule

    compiled = csc.compile(
        captions.Captions(), mesh="pp=2", example=captions.batch([[1]] * 4), freeze=["vision"], microbatches=2,
        encode_ahead=True,
    )  # fmt: skip
    with pytest.raises(InputError, match="the Trainer does not say which batch follows"):
        CompiledTrainer(compiled, arguments(tmp_path))
    with pytest.raises(InputError, match="Lightning does not say which batch follows"):
        CompiledModule(compiled, torch.optim.SGD)


@pytest.mark.long
def test_hf_trainer_balances_with_kept_features(tmp_path: Path) -> None:
    """Two epochs, the second from disk, as without features; each step has the images of other samples."""
    whole = captions.batch([[1]] * 16)
    data = [{name: one.chunk(16)[i] for name, one in whole.items()} for i in range(16)]
    balance = {"lengths": {"tokens": [14] * 16, "images": [1] * 16}, "multiple": 14}
    settings = arguments(
        tmp_path, num_train_epochs=2, max_steps=-1, train_sampling_strategy="random", remove_unused_columns=False
    )
    seen = []
    for folder in (None, tmp_path / "features"):
        compiled = csc.compile(
            captions.Captions(), mesh="pp=2", example=captions.batch([[1]] * 4), freeze=["vision"], microbatches=2,
            cache_features=folder,
        )  # fmt: skip
        log = Losses()
        CompiledTrainer(
            compiled, settings, balance=balance, train_dataset=data, callbacks=[log],
            data_collator=lambda rows: {name: torch.cat([row[name] for row in rows]) for name in rows[0]},
        ).train()  # fmt: skip
        seen.append(log.seen)
    assert len(seen[0]) == 8 and seen[1] == pytest.approx(seen[0], abs=1e-6)
    assert compiled.metrics["features_made"] == 0 and compiled.metrics["features_read"] == 4


def with_lightning(
    compiled: csc.CompiledModel,
    directory: Path,
    ranks: bool = False,
    loader: Any = None,
    total: int = STEPS,
    resume: Path | None = None,
) -> tuple[list[float], Any]:
    """The losses that Lightning saw, and its trainer; ranks: under torchrun, with a checkpoint of all of them. total:
    steps of the schedule. resume: a checkpoint of the first epoch, after which a second one is trained.
    """
    import lightning

    from csc.integrations.lightning import CompiledModule, OneRankEach

    losses: list[float] = []

    class Recorded(CompiledModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            losses.append(float(loss := super().training_step(batch, batch_idx)))
            return loss

    module = Recorded(
        compiled,
        lambda own: torch.optim.AdamW(own, lr=RATE, weight_decay=0.0),
        lambda optimizer: get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=total),
        max_norm=NORM,
    )
    trainer = lightning.Trainer(
        max_epochs=1 if resume is None else 2, accelerator="cpu", devices=1, logger=False, default_root_dir=directory,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        strategy=OneRankEach(compiled) if ranks else "auto",
    )  # fmt: skip
    loader = loader or DataLoader(samples(), batch_size=ROWS, collate_fn=collate)
    trainer.fit(module, loader, ckpt_path=resume)
    trainer.save_checkpoint(directory / "last.ckpt")
    return losses, trainer


def stored_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Of Lightning's checkpoint, by the model's own names."""
    stored = torch.load(directory / "last.ckpt", weights_only=False)["state_dict"]
    return {name.removeprefix("model."): tensor for name, tensor in stored.items()}


def test_lightning_does_what_a_loop_does(fresh: Callable[[], csc.CompiledModel], tmp_path: Path) -> None:
    expected, trained = loop(fresh(), batches())
    compiled = fresh()
    losses, _ = with_lightning(compiled, tmp_path)
    assert losses == expected and same(parameters(compiled.model), trained)
    stored = stored_weights(tmp_path)
    assert same({name: stored[name] for name in trained}, trained)


@pytest.mark.gloo
def test_lightning_on_two_processes(fresh: Callable[[], csc.CompiledModel], tmp_path: Path) -> None:
    """Each runs its rank on all batches; the checkpoint has the weights of both, and one process takes it up."""
    from tests.compiler import lightning_worker  # which imports this file

    launching.ranks(lightning_worker.main, 2, tmp_path)
    expected, trained = loop(fresh(), batches() * 2)
    assert json.loads((tmp_path / "losses.json").read_text()) == expected[:STEPS]
    stored, at_half = stored_weights(tmp_path), loop(fresh(), batches(), 2 * STEPS)[1]
    assert same({name: stored[name] for name in at_half}, at_half)
    steps = tmp_path / "last.ckpt.csc"
    [step] = steps.iterdir()
    shutil.copytree(step, steps / "step-00000009")  # as a save that was cut off before Lightning's file
    losses, trainer = with_lightning(
        fresh(), tmp_path / "again", ranks=True, total=2 * STEPS, resume=tmp_path / "last.ckpt"
    )
    assert losses == expected[STEPS:] and same(parameters(trainer.lightning_module.model), trained)
    shutil.rmtree(step)
    with pytest.raises(InputError, match=rf"it is of step {STEPS}, and the folder last\.ckpt\.csc has 9"):
        with_lightning(fresh(), tmp_path / "again", ranks=True, resume=tmp_path / "last.ckpt")
    shutil.rmtree(steps)
    with pytest.raises(InputError, match=r"beside it is no folder last\.ckpt\.csc"):
        with_lightning(fresh(), tmp_path / "again", ranks=True, resume=tmp_path / "last.ckpt")
