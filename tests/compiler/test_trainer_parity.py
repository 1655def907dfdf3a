"""CompiledTrainer beside the Trainer of the installed transformers: the same parameters after a few steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.neftune import activate_neftune

import csc
from csc.errors import InputError
from csc.integrations.hf import CompiledTrainer, compile_for, compiled_trainer
from csc.integrations.trainer_arguments import apply
from tests import launching
from tests.compiler.peft_models import adapted
from tests.models import hf
from tests.tiers import long

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("traces")]

Sample = dict[str, torch.Tensor]
RATE = 0.5  # of SGD: differences of gradients are differences of parameters


class Averaging(LlamaForCausalLM):
    """As Qwen2.5-VL, Gemma 4 and others: the Trainer averages batches."""

    accepts_loss_kwargs = False


class Plain(nn.Module):
    """A forward without `**kwargs`. Its labels may have another name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(99, 8), nn.Linear(8, 99)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, targets: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids).tanh())
        chosen = labels if labels is not None else targets
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), chosen.flatten()), "logits": logits}


class Swallowing(Plain):
    """Takes any keyword, and divides by its own labels all the same: the Trainer adds batches up."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        return super().forward(input_ids, labels)


class Routed(Plain):
    """A term that is no mean over labels, beside one that is."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids).tanh())
        each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": each / items + self.head.weight.square().sum(), "logits": logits}


class CountingOthers(Plain):
    """Counts the labels behind the first, the Trainer all of them."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        logits, labels = self.head(self.embed(input_ids).tanh())[:, :-1], labels[:, 1:]
        each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": each / items, "logits": logits}


def model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind(hf.llama_config(2)) if issubclass(kind, LlamaForCausalLM) else kind()


def samples(count: int) -> list[Sample]:
    """Between 1 and 11 labels each, so that batches weigh differently."""
    ids = 1 + (7 * torch.arange(count).unsqueeze(1) + torch.arange(12)) % 90
    labels = ids.clone()
    for row in range(count):
        labels[row, : 1 + (5 * row) % 11] = hf.IGNORED
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(count)]


def collate(rows: list[Sample]) -> Sample:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    settings = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "num_train_epochs": 1,
        "learning_rate": RATE, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "logging_steps": 1,
        "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "optim": "sgd",
        "train_sampling_strategy": "sequential", "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(str(directory), **{**settings, **changes})


def compiled(
    own: nn.Module, data: list[Sample], mesh: str = "pp=2", count: int = 2, **options: Any
) -> csc.CompiledModel:
    return csc.compile(own, mesh=mesh, example=collate(data[:count]), **options)


def counted(prediction: Any) -> dict[str, float]:
    """A metric that sees each sample once."""
    seen = prediction.label_ids != hf.IGNORED
    return {
        "samples": len(seen),
        "right": float((prediction.predictions.argmax(-1) == prediction.label_ids)[seen].sum()),
    }


class Stream(IterableDataset[Sample]):
    def __init__(self, rows: list[Sample]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.rows)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def agree(found: CompiledTrainer, expected: Trainer, rounding: float = 1e-4) -> None:
    """Parameters, and the logs of losses and norms."""
    first = dict(model_before(expected))
    assert any(not torch.equal(first[name], p) for name, p in expected.model.named_parameters()), "nothing was trained"
    for name, parameter in expected.model.named_parameters():
        own = found.compiled.model.get_parameter(name)
        torch.testing.assert_close(own, parameter, rtol=rounding, atol=rounding / 10, msg=name)
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "num_input_tokens_seen"):
        assert logged(found, name) == pytest.approx(logged(expected, name), rel=1e-3, abs=2e-4), name
    assert found.state.global_step == expected.state.global_step
    assert found.state.epoch == expected.state.epoch


def model_before(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    own = trainer.model
    again = adapted(model(Averaging)) if hasattr(own, "peft_config") else model(type(own))
    yield from again.named_parameters()


def both(
    kind: type[nn.Module], directory: Path, data: Any, make: Callable[[nn.Module], nn.Module] = lambda own: own,
    example: list[Sample] | None = None, options: dict[str, Any] | None = None, given: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[CompiledTrainer, Trainer]:  # fmt: skip
    """After the training of each."""
    settings = {"train_dataset": data, "data_collator": collate, **(given or {})}
    expected = Trainer(make(model(kind)), arguments(directory, **changes), **settings)
    expected.train()
    own = compiled(make(model(kind)), example or data, **(options or {}))
    found = CompiledTrainer(own, arguments(directory, **changes), **settings)
    found.train()
    return found, expected


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Averaging, Plain, Swallowing])
@pytest.mark.long_cases("LlamaForCausalLM", "Averaging", "Plain")
def test_accumulated_batches_weigh_as_in_the_trainer(kind: type[nn.Module], tmp_path: Path) -> None:
    """Three batches a step, and two in the last one of the epoch."""
    data = samples(10)
    agree(*both(kind, tmp_path, data, gradient_accumulation_steps=3, include_num_input_tokens_seen="all"))


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Averaging])
@pytest.mark.long_cases("Averaging")
def test_what_a_stream_leaves_over_joins_the_next_step(kind: type[nn.Module], tmp_path: Path) -> None:
    """7 batches in steps of 3: the last one has a weight of its own, as gradients that the Trainer does not clear."""
    data = samples(14)
    agree(*both(kind, tmp_path, Stream(data), example=data, gradient_accumulation_steps=3, max_steps=3))


@pytest.mark.long
def test_qwen_vl_is_averaged(tmp_path: Path) -> None:
    """Whose class says that it takes no loss kwargs."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 99,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2, "intermediate_size": 16}

    def qwen() -> nn.Module:
        torch.manual_seed(0)
        return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))

    data, settings = samples(8), arguments(tmp_path, gradient_accumulation_steps=2)
    expected = Trainer(qwen(), settings, train_dataset=data, data_collator=collate)
    assert not expected.model_accepts_loss_kwargs
    expected.train()
    found = CompiledTrainer(compiled(qwen(), data), settings, train_dataset=data, data_collator=collate)
    found.train()
    for name, parameter in expected.model.named_parameters():
        torch.testing.assert_close(found.model.get_parameter(name), parameter, rtol=1e-3, atol=1e-5, msg=name)


def test_items_are_passed_to_who_asks_for_them(tmp_path: Path) -> None:
    """A term that the Trainer counts once a batch: exact with the items in the example, else refused."""
    data, settings = samples(8), arguments(tmp_path, gradient_accumulation_steps=2)
    expected = Trainer(model(Routed), settings, train_dataset=data, data_collator=collate)
    expected.train()
    example = {**collate(data[:2]), "num_items_in_batch": torch.tensor(10)}
    own = csc.compile(model(Routed), mesh="pp=2", example=example, cuts=["head"])
    found = CompiledTrainer(own, settings, train_dataset=data, data_collator=collate)
    found.train()
    agree(found, expected)
    without = CompiledTrainer(
        csc.compile(model(Routed), mesh="pp=2", example=collate(data[:2]), cuts=["head"]),
        settings, train_dataset=data, data_collator=collate,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"which divides a part of its loss by it .*adds up 2 batches"):
        without.train()


def test_a_loss_that_counts_other_labels_is_refused(tmp_path: Path) -> None:
    """Already with one batch a step, where the Trainer trains another loss than forward returns by itself."""
    data = samples(4)
    own = csc.compile(model(CountingOthers), mesh="pp=2", example=collate(data[:2]), cuts=["head"])
    trainer = CompiledTrainer(own, arguments(tmp_path), train_dataset=data, data_collator=collate)
    with pytest.raises(InputError, match="it counts other labels than the Trainer"):
        trainer.train()
    example = {**collate(data[:2]), "num_items_in_batch": torch.tensor(10)}
    expected = Trainer(model(CountingOthers), arguments(tmp_path), train_dataset=data, data_collator=collate)
    expected.train()
    asked = csc.compile(model(CountingOthers), mesh="pp=2", example=example, cuts=["head"])
    found = CompiledTrainer(asked, arguments(tmp_path), train_dataset=data, data_collator=collate)
    found.train()
    agree(found, expected)


# What two processes train: batches of 4 of 15 samples, so that the last one is uneven; and a stream that ends in the
# middle of a step. 7 samples are evaluated in batches of 2: one round of two, then two batches that both have.
TWO: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "averaged": (Averaging, {
        "gradient_accumulation_steps": 2, "eval_strategy": "epoch", "num_train_epochs": 2,
        "train_sampling_strategy": "random", "include_num_input_tokens_seen": "all",
    }),
    "by items": (LlamaForCausalLM, {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}),
    "items passed": (LlamaForCausalLM, {"gradient_accumulation_steps": 2}),
    "stream": (Averaging, {"gradient_accumulation_steps": 3, "max_steps": 3}),
}  # fmt: skip


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp=2", long("pp=2")])
def test_two_processes_do_what_the_trainer_does_in_one(mesh: str, tmp_path: Path) -> None:
    from tests.compiler import trainer_parity_worker  # which imports this file

    launching.ranks(trainer_parity_worker.main, 2, tmp_path, mesh)
    found = json.loads((tmp_path / "result.json").read_text())
    for name, (kind, changes) in TWO.items():
        own = found[name]
        data = Stream(samples(14)) if name == "stream" else samples(15)
        settings = arguments(tmp_path / name, per_device_train_batch_size=4, **changes)
        expected = Trainer(
            model(kind), settings, train_dataset=data, eval_dataset=samples(7), data_collator=collate,
            compute_metrics=counted,
        )  # fmt: skip
        expected.train()
        weight = expected.model.lm_head.weight
        torch.testing.assert_close(torch.tensor(own["weight"]), weight.detach(), rtol=1e-4, atol=1e-5, msg=name)
        wanted = ("loss", "grad_norm", "eval_loss", "eval_samples", "eval_right", "num_input_tokens_seen", "epoch")
        for key in wanted:
            then = [entry[key] for entry in own["history"] if key in entry]
            assert then == pytest.approx(logged(expected, key), rel=1e-3, abs=2e-4), (name, key)
        assert own["streamed"] == pytest.approx(expected.evaluate(samples(7))["eval_loss"], rel=1e-5)
        assert own["predictions"] == expected.predict(samples(7)).predictions.argmax(-1).tolist()
        assert own["flos"] == expected.state.total_flos


AS_PEOPLE_HAVE_THEM = [{"bf16": True}, long({"bf16": True, "gradient_checkpointing": True})]


@pytest.mark.parametrize("changes", AS_PEOPLE_HAVE_THEM, ids=lambda changes: " ".join(changes))
def test_arguments_that_change_the_model(changes: dict[str, Any], tmp_path: Path) -> None:
    """Evaluations are between the steps: accelerate would put autocast around the model in the first one."""
    changes = {**changes, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    data = samples(6)

    def trained(kind: str) -> tuple[nn.Module, list[float]]:
        own, args = model(LlamaForCausalLM), arguments(tmp_path / kind, **changes)
        given = {"args": args, "train_dataset": data, "eval_dataset": data[:2], "data_collator": collate}
        if kind == "eager":
            trainer = Trainer(own, **given)
        else:
            trainer = CompiledTrainer(compile_for(own, args, mesh="pp=2", example=collate(data[:2])), **given)
        trainer.train()
        return own, [row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss") if key in row]

    eager, losses = trained("eager")
    own, seen = trained("csc")
    assert len(losses) == 6
    assert seen == pytest.approx(losses, rel=2e-3)
    first = model(LlamaForCausalLM).get_parameter("model.embed_tokens.weight").detach()
    moved, expected = (one.get_parameter("model.embed_tokens.weight").detach() - first for one in (own, eager))
    assert float((moved - expected).norm() / expected.norm()) < 2e-2


def test_bf16_of_a_model_compiled_with_a_precision_is_evaluated_so(tmp_path: Path) -> None:
    data, args = samples(2), arguments(tmp_path, bf16=True)
    own = compile_for(model(LlamaForCausalLM), args, mesh="pp=2", example=collate(data), precision="bf16")
    trainer = CompiledTrainer(own, args, train_dataset=data, eval_dataset=data, data_collator=collate)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = float(own.model.eval()(**collate(data)).loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    trainer.train()


@long
def test_noise_is_in_the_compiled_steps_alone(tmp_path: Path) -> None:
    """Each step is compared with eager PyTorch that draws the same noise; evaluation has none."""
    data, args = samples(2), arguments(tmp_path, neftune_noise_alpha=5.0, num_train_epochs=2)
    plain = float(model(LlamaForCausalLM)(**collate(data)).loss)
    own = compile_for(model(LlamaForCausalLM), args, mesh="pp=2", example=collate(data))
    trainer = CompiledTrainer(own, args, train_dataset=data, eval_dataset=data, data_collator=collate)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain, rel=1e-6)
    trainer.train()
    first = trainer.state.log_history[1]["loss"]
    assert first != pytest.approx(plain, rel=1e-5) and first == pytest.approx(plain, rel=0.1)


def test_noise_is_drawn_as_transformers_draws_it(tmp_path: Path) -> None:
    own, x = model(LlamaForCausalLM), torch.tensor([[3, 5, 8]])
    apply(arguments(tmp_path, neftune_noise_alpha=5.0), own, None)
    theirs = model(LlamaForCausalLM)
    activate_neftune(theirs, 5.0)
    torch.manual_seed(7)
    expected = theirs.get_input_embeddings()(x)
    torch.manual_seed(7)
    torch.testing.assert_close(own.get_input_embeddings()(x), expected)


def test_noise_without_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Plain has no get_input_embeddings"):
        compile_for(Plain(), arguments(tmp_path, neftune_noise_alpha=5.0))


class OwnLoss(Trainer):
    """A loss of its own: the model's, times a factor."""

    factor = 1.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:  # type: ignore[override]
        outputs = model(**inputs)
        loss = self.factor * outputs["loss"]
        return (loss, outputs) if return_outputs else loss


class OwnOptimizer(Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=9.0)


class Counting(TrainerCallback):
    steps = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1


def test_a_trainer_is_taken_over_and_evaluated_by_its_ranks(tmp_path: Path) -> None:
    """Batches of evaluation need not be of the size of training's."""
    data, count = samples(7), Counting()

    def made(kind: str) -> OwnLoss:
        args = arguments(tmp_path / kind, per_device_train_batch_size=2, max_steps=2)
        callbacks = [count] if kind == "csc" else []
        return OwnLoss(model(Plain), args, collate, train_dataset=data[:4], eval_dataset=data[4:], callbacks=callbacks)

    eager, own = made("eager"), compiled_trainer(made("csc"), distributed_evaluation=True, mesh="pp=2", microbatches=2)
    for trainer in (eager, own):
        trainer.train()
    assert count.steps == 2
    assert own.evaluate()["eval_loss"] == pytest.approx(eager.evaluate()["eval_loss"], rel=1e-5)
    losses = [[row["loss"] for row in one.state.log_history if "loss" in row] for one in (eager, own)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_trainer_that_computes_otherwise_is_not_taken_over(tmp_path: Path) -> None:
    data, args = samples(4), arguments(tmp_path)
    other = OwnLoss(model(Plain), args, collate, train_dataset=data)
    other.factor = 2.0
    with pytest.raises(InputError, match=r"OwnLoss's loss of the example is [\d.]+, and its model's own [\d.]+"):
        compiled_trainer(other, mesh="pp=2")
    with pytest.raises(InputError, match="OwnOptimizer has a create_optimizer of its own"):
        compiled_trainer(OwnOptimizer(model(Plain), args, collate, train_dataset=data))
    with pytest.raises(InputError, match="compute_metrics is set, and the ranks' evaluation gives the loss alone"):
        CompiledTrainer(
            compiled(model(Plain), data), args, distributed_evaluation=True, compute_metrics=counted, train_dataset=data
        )
