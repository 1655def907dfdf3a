"""What bad input gets: one sentence that says what is wrong, where, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import CscError, InputError
from csc.reports.verification import verify
from tests.compiler import small
from tests.compiler.conftest import Models

Step = Callable[[], Any]


def refused(step: Step, what: str, where: str, remedy: str) -> CscError:
    """The error of a call: its three parts hold these texts, and it reads as one line of prose."""
    with pytest.raises(CscError) as caught:
        step()
    error = caught.value
    assert what in error.what
    assert where in error.where
    assert remedy in error.remedy
    assert "\n" not in str(error)
    assert str(error).endswith((".", "?", "!"))
    return error


class Base(nn.Module):
    """A classifier; what is wrong with it comes in the subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 5)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.second(torch.tanh(self.first(x))), labels)


def batch(samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return {"x": torch.randn(samples, 8, generator=generator), "labels": torch.arange(samples) % 5}


def line_of(method: Callable[..., Any], code: str) -> str:
    """`file.py:NN` of the line of a method that holds `code`."""
    lines, first = inspect.getsourcelines(method)
    (offset,) = [i for i, line in enumerate(lines) if code in line]
    return f"test_bad_input.py:{first + offset}"


# --- models ------------------------------------------------------------------------------------------------------


class Branches(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.first(x).sum() > 0:
            x = x * 2
        return self.loss(x, labels)


def test_a_branch_on_the_values_of_a_tensor() -> None:
    refused(
        lambda: csc.compile(Branches(), example=batch()),
        "Python decision that depends on the values of a tensor, computed from x (",
        line_of(Branches.forward, "if self.first(x).sum()"),
        "torch.where",
    )


class CallsNumpy(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(torch.from_numpy(x.detach().numpy() * 2), labels)


class Counts(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        width = int(self.first(x).argmax().item())
        return self.loss(x, labels) * torch.ones(8)[:width].sum()


@pytest.mark.parametrize("model", [CallsNumpy, Counts])
def test_a_model_that_cannot_be_traced(model: type[Base]) -> None:
    code = "numpy" if model is CallsNumpy else "[:width]"
    with pytest.raises(InputError) as caught:
        csc.compile(model(), example=batch())
    assert line_of(model.forward, code) in str(caught.value) or line_of(model.forward, ".item()") in str(caught.value)
    assert caught.value.remedy


class OnFunctions(Base):
    """Calls an operator that takes functions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.name == "torch.cond":
            return self.loss(torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,)), labels)
        from torch._higher_order_ops.while_loop import while_loop

        halved = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 0.5), (torch.tensor(0), x))[1]
        return self.loss(halved, labels)


@pytest.mark.parametrize(("name", "remedy"), [("torch.cond", "torch.where"), ("while_loop", "loop in Python")])
def test_an_operator_on_functions_is_named(name: str, remedy: str) -> None:
    batch = {"x": torch.randn(4, 8), "labels": torch.arange(4) % 5}
    make = partial(csc.compile, OnFunctions(name), example=batch, cache=False)
    refused(make, f"the model calls {name}, an operator on functions", "test_bad_input.py", remedy)


class Averaging(Base):
    """A codebook's exponential average, which forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Buffer(torch.ones(8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.loss(x * self.average, labels)


def test_a_buffer_that_forward_writes_is_named_with_its_line() -> None:
    batch = {"x": torch.randn(4, 8), "labels": torch.arange(4) % 5}
    make = partial(csc.compile, Averaging(), example=batch, cache=False)
    refused(make, "writes to 'average'", "test_bad_input.py:", "csc.opaque")


class Plain(Base):
    """The classifier as it is."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(x, labels)


def test_a_gradient_from_before_a_change_of_size() -> None:
    model = Plain()
    batch = {"x": torch.randn(4, 8), "labels": torch.arange(4) % 5}
    model.second.weight.grad = torch.zeros(5, 8)
    model.second.weight.data, model.second.bias.data = torch.randn(7, 8), torch.randn(7)
    make = partial(csc.compile, model, example=batch, cache=False)
    refused(make, "a parameter's .grad is not of the parameter's size", "model", "zero_grad")


class Counted(Base):
    """The loss is divided by a number that the loop counts."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.second(self.first(x)), labels, reduction="sum") / num_items_in_batch


def test_a_number_that_changes_wants_to_be_a_tensor() -> None:
    batch = {"x": torch.randn(4, 8), "labels": torch.arange(4) % 5}
    compiled = csc.compile(Counted(), example={**batch, "num_items_in_batch": 4}, microbatches=2, cache=False)
    compiled.train_step({**batch, "num_items_in_batch": 4})
    other = {**batch, "num_items_in_batch": 7}
    refused(lambda: compiled.train_step(other), "plain values", "batch", "{'num_items_in_batch': torch.tensor(7)}")
    first = {**batch, "num_items_in_batch": torch.tensor(4)}
    compiled = csc.compile(Counted(), example=first, microbatches=2, cache=False)
    for number in (4, 7):
        given = {**batch, "num_items_in_batch": torch.tensor(number)}
        torch.testing.assert_close(compiled.train_step(given), compiled.model(**given).detach())
    assert len(compiled.compiler.captures) == 1


class Fails(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(x.view(3, 7), labels)


class Clamping(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.second.weight.data.clamp_(-1.0, 1.0)
        return self.loss(x, labels)


def test_a_model_that_changes_its_parameters() -> None:
    step = lambda: csc.compile(Clamping(), example=batch())  # noqa: E731
    refused(step, "changes a parameter while it runs", "second.weight", "weight.clamp(")


class WritingToLinear(nn.Module):
    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.linear, self.copied = nn.Linear(4, 4), copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y = y.clone() if self.copied else y
        y[:, 0] = y[:, 0] * 3
        return y.square().mean()


def test_a_model_that_writes_to_a_part_of_a_linear_maps_result() -> None:
    """A view of what torch makes within `linear`. The remedy is one."""
    example = {"x": torch.randn(3, 5, 4)}
    step = lambda: csc.compile(WritingToLinear(False), example=example)  # noqa: E731
    refused(step, "a part of what a linear map gave", "model", "linear(x).clone()")
    csc.compile(WritingToLinear(True), mesh="pp=1", example=example).train_step(example)  # compared with eager


def test_a_model_that_fails_by_itself() -> None:
    refused(
        lambda: csc.compile(Fails(), example=batch()),
        "cannot be traced", line_of(Fails.forward, "view(3, 7)"), "run model(**batch) in eager mode first",
    )  # fmt: skip


@pytest.mark.parametrize("file", ["csc/capture/lower/flatten.py", "passes/loss.py"])
def test_a_model_with_which_csc_itself_fails(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the traceback ends in csc, that is said, and which line of the model it was about."""
    folder, _, name = file.partition("/")
    space: dict[str, Any] = {}
    place = f"{(csc if folder == 'csc' else csc.passes).__path__[0]}/{name}"
    exec(compile("def broken(*given): return {}['absent']", place, "exec"), space)
    monkeypatch.setattr(csc.capture.capture, "flatten", space["broken"])
    error = refused(
        lambda: csc.compile(Squared(), example=batch()),
        f"{file}:1, in broken: KeyError: 'absent'", line_of(Squared.forward, "def forward"),
        "a fault of csc, not of the model: please report it with the named line",
    )  # fmt: skip
    assert error.what.startswith("csc itself failed while it traced the model, at ")
    assert not isinstance(error, InputError) and "eager mode" not in str(error)


class Logits(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.second(self.first(x))}


class Vector(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.second(self.first(x)), labels, reduction="none")


class OptionalLabels(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.second(self.first(x))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class LogitsAlone(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_model_without_a_loss() -> None:
    """The sentence has what it returned, and what helps: labels where it takes some and has none."""
    shape = list(Logits()(**batch())["logits"].shape)
    refused(
        lambda: csc.compile(Logits(), example=batch()),
        f"Logits returned logits {shape}: a dict without a loss", "model output", "return the loss from forward",
    )  # fmt: skip
    refused(
        lambda: csc.compile(OptionalLabels(), example={"x": batch()["x"]}),
        f"OptionalLabels returned logits {shape}", "model output", "give the batch labels, which its forward takes",
    )  # fmt: skip
    csc.compile(OptionalLabels(), example=batch())
    refused(
        lambda: csc.compile(LogitsAlone(), example=batch()),
        f"LogitsAlone returned a tensor {shape} of float32, and a loss is one", "model output",
        "if they are logits return",
    )  # fmt: skip
    refused(
        lambda: csc.compile(Vector(), example=batch()),
        f"Vector returned a tensor {shape[:1]} of float32", "model output", "return loss.mean()",
    )  # fmt: skip


class Norms(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.norm(x), labels)


class Statistics(Base):
    """Norms that write to running statistics though their operations do not say so."""

    def __init__(self, norm: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.norm(x, self.running_mean, self.running_var), labels)


def batch_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean, var, training=True)


def instance_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return F.instance_norm(x.t()[None], mean, var)[0].t()


@pytest.mark.parametrize("model", [Norms(), Statistics(batch_norm), Statistics(instance_norm)])
def test_norms_in_training_mode(model: nn.Module) -> None:
    error = refused(
        lambda: csc.compile(model, example=batch()), "writes to '", "test_bad_input.py", "put that module in eval mode"
    )
    assert "running_mean" in str(error) or "num_batches_tracked" in str(error)


def test_dropout_draws_its_own_numbers() -> None:
    """A loss that eager cannot reproduce is no error; verify says that there are random operations."""

    class Drops(Base):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.loss(F.dropout(x, 0.5), labels)

    result = verify(csc.compile(Drops(), example=batch()))
    assert result.random_ops == 1
    assert result.params_missing == ()


# --- freezing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("vision_towr", "did you mean 'vision_tower'"), ("*.lora_A.*", "components are"), ("xyz", "language_model")],
)
@pytest.mark.long_cases("vision_towr-did you mean 'vision_tower'")
def test_a_pattern_that_matches_nothing(models: Models, pattern: str, hint: str) -> None:
    step = lambda: models("llava", freeze=[pattern]).program  # noqa: E731
    refused(step, f"the pattern {pattern!r} matches no parameter of LlavaForConditionalGeneration", "freeze", hint)


@pytest.mark.parametrize("freeze", [["*"], ["vision_tower", "multi_modal_projector", "language_model"]])
def test_nothing_is_left_to_train(models: Models, freeze: list[str]) -> None:
    step = lambda: models("llava", freeze=freeze).program  # noqa: E731
    refused(step, "nothing is left to train: all 98 parameters", "freeze", "freeze fewer components")


def test_freeze_of_something_else() -> None:
    refused(lambda: csc.compile(Base(), freeze=[3]), "freeze holds 3, which is no name", "compile", "list of strings")  # type: ignore[list-item]


# --- mesh, cuts, schedule ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_more_stages_than_regions(models: Models) -> None:
    step = lambda: models("text", mesh="pp=9").program  # noqa: E731
    refused(step, "the mesh asks for 9 stages, and TextModel has 7 regions", "mesh", "use pp=7 or less")


@pytest.mark.parametrize(
    ("mesh", "what"),
    [("pp=two", "'pp=two' is not NAME=SIZE"), ("ep=2", "no axis 'ep'"), ({"pp": 0}, "size 0")],
    ids=str,
)
def test_a_mesh_that_is_none(mesh: Any, what: str) -> None:
    refused(lambda: csc.compile(Base(), mesh=mesh), what, "mesh", "")


def test_a_cut_that_names_no_region(models: Models) -> None:
    step = lambda: models("text", mesh="pp=2", cuts=["layer.2"]).program  # noqa: E731
    refused(step, "'layer.2'", "cuts", "layers.2")


@pytest.mark.parametrize(("cuts", "stages"), [(["layers.1"], 3), (["layers.1", "layers.2", "norm"], 2)])
def test_a_wrong_number_of_cuts(models: Models, cuts: list[str], stages: int) -> None:
    step = lambda: models("text", mesh={"pp": stages}, cuts=cuts).program  # noqa: E731
    remedy = f"name {stages - 1} regions"
    refused(step, f"{len(cuts)} cuts make {len(cuts) + 1} stages, and the mesh has pp={stages}", "cuts", remedy)


def test_an_unknown_schedule(models: Models) -> None:
    step = lambda: models("text", mesh="pp=2", schedule="zigzag").program  # noqa: E731
    refused(step, "no schedule 'zigzag'", "schedule", "gpipe, 1f1b")


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_microbatches_that_are_no_count(count: Any) -> None:
    refused(lambda: csc.compile(Base(), microbatches=count), repr(count), "compile", "at least 1")


# --- batches -----------------------------------------------------------------------------------------------------


def with_entry(entries: Mapping[str, torch.Tensor], **changed: Any) -> dict[str, Any]:
    return {name: value for name, value in {**entries, **changed}.items() if value is not None}


def test_a_batch_with_other_keys_or_dtypes(models: Models) -> None:
    compiled = models("text", mesh="pp=2")
    good = small.text_batch()
    keys = "give the entries of the example: labels, tokens"
    refused(lambda: compiled.train_step(with_entry(good, labels=None)), "no entry 'labels'", "batch", keys)
    extra = with_entry(good, pixels=torch.zeros(2, 3))
    refused(lambda: compiled.train_step(extra), "an entry 'pixels' that the example had not", "batch", keys)
    floats = with_entry(good, tokens=good["tokens"].int())
    remedy = "convert it with .to(torch.int64)"
    refused(
        lambda: compiled.train_step(floats),
        "'tokens' is torch.int32, the example's was torch.int64",
        "batch",
        remedy,
    )
    compiled.train_step(good)
    compiled.zero_grad()


def test_sizes_that_microbatches_do_not_divide(models: Models) -> None:
    compiled = models("text", mesh="pp=2,dp=2", microbatches=3)
    odd = small.text_batch(samples=8)
    refused(lambda: compiled.train_step(odd), "the batch has 8 samples; 6 microbatches", "batch", "multiple of 6")


def test_a_batch_of_no_tokens_has_no_loss(models: Models) -> None:
    compiled = models("text", mesh="pp=2")
    none = {name: tensor[:, :0] for name, tensor in small.text_batch().items()}
    refused(lambda: compiled.train_step(none), "not finite", "step", "no label")


@pytest.mark.parametrize("kind", [torch.sparse_coo, torch.jagged])
def test_a_batch_with_tensors_that_are_not_dense(kind: torch.layout) -> None:
    given = torch.eye(3)
    example = {
        "x": torch.nested.nested_tensor([*given], layout=kind) if kind is torch.jagged else given.to_sparse(layout=kind)
    }
    told = "nested" if kind is torch.jagged else str(kind).removeprefix("torch.")
    refused(
        lambda: csc.compile(nn.Linear(3, 3), example=example),
        f"'x' is a {told} tensor",
        "batch",
        "its parts as entries",
    )


@pytest.mark.parametrize("example", [[1, 2], {}, {"x": 3}, {"x": torch.zeros(2, requires_grad=True)}], ids=str)
def test_an_example_that_is_no_batch(example: Any) -> None:
    error = refused(lambda: csc.compile(Base(), example=example), "", "", "")
    assert error.where == "example batch"
    assert error.remedy


def test_no_example_at_all() -> None:
    refused(lambda: csc.compile(Base()).program, "no example batch", "compile", "pass example=batch")


@pytest.mark.slow
def test_shapes_that_do_not_fit_the_model(models: Models) -> None:
    """Another length than the example's is fine; one that the model's own tables do not cover is not."""
    compiled = models("plain", mesh="pp=2")
    with pytest.raises(CscError):
        from tests.models import plain

        compiled.train_step(plain.plain_batch(length=10) | {"labels": torch.zeros(2, 9, dtype=torch.int64)})
    assert all(p.grad is None for p in compiled.model.parameters())


class Careful(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(x, labels)

    def check_batch(self, batch: Mapping[str, torch.Tensor]) -> None:
        if (batch["labels"] == 3).any():
            raise InputError("there is a label 3", "batch", "leave it out")


@pytest.mark.parametrize("token", [small.VOCABULARY, -1])
def test_ids_that_the_embedding_has_no_row_for(token: int) -> None:
    example = small.mixed_batch(samples=4)
    compiled = csc.compile(small.mixed(), example=example, mesh={"pp": 2}, microbatches=2, cache=False)
    bad = {name: tensor.clone() for name, tensor in example.items()}
    bad["tokens"][3, 5] = token
    what = f"key 'tokens': the id {token} in sample 1 at [5] is no row of 'body.embed.weight', which has 32"
    for _ in range(2):  # before the program was compared with eager PyTorch, and behind that
        refused(lambda: compiled.train_step(bad), what, "microbatch 1", "tokenizer")
        assert all(parameter.grad is None for parameter in compiled.model.parameters())
        compiled.train_step(example)
        compiled.model.zero_grad()


class Shifted(nn.Module):
    """Labels as transformers shifts them, for three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), shifted.view(-1))


@pytest.mark.parametrize("label", [3, -1])
def test_labels_that_are_no_class(label: int) -> None:
    """Said before the step, with the place; where labels are not read, anything may stand, as in eager PyTorch."""
    example = {"tokens": torch.arange(24).view(4, 6) % 8, "labels": torch.arange(24).view(4, 6) % 3}
    compiled = csc.compile(Shifted(), example=example, mesh={"pp": 2}, microbatches=2, cache=False)
    bad = {name: tensor.clone() for name, tensor in example.items()}
    bad["labels"][3, 5] = label
    what = f"key 'labels': the label {label} in sample 1 at [5] is none of the 3 classes of the loss, nor -100 for none"
    for _ in range(2):
        refused(lambda: compiled.train_step(bad), what, "microbatch 1", "tokenizer")
        assert all(parameter.grad is None for parameter in compiled.model.parameters())
        good = {name: tensor.clone() for name, tensor in example.items()}
        good["labels"][:, 0], good["labels"][1, 2:] = label, -100
        assert torch.allclose(compiled.train_step(good), Shifted.forward(compiled.model, **good))
        compiled.model.zero_grad()


def test_the_models_own_check_of_a_batch() -> None:
    """It runs before the step, on every microbatch, and nothing has happened when it raises."""
    compiled = csc.compile(Careful(), example=batch(), microbatches=2)
    compiled.train_step([batch(2), batch(2)], microbatches=2)
    before = {name: p.grad.clone() for name, p in compiled.named_parameters()}
    for given in (batch(), [batch(2), batch()]):
        refused(lambda given=given: compiled.train_step(given), "there is a label 3", "batch", "leave it out")  # type: ignore[misc]
    assert all(torch.equal(p.grad, before[name]) for name, p in compiled.named_parameters())


# --- losses ------------------------------------------------------------------------------------------------------


class TimesAnother(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(x, labels) * self.first(x).square().mean()


class Padded(Base):
    """The loss beside a number that each microbatch would add."""

    number = 1.0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(self.loss(x, labels).view(1), (0, 2), value=self.number).sum()


def test_a_loss_that_is_padded_with_a_number() -> None:
    """It is added once, to the loss of the whole batch."""
    for number in (1.0, 0.0):
        model = Padded()
        model.number = number
        found = verify(csc.compile(model, example=batch(), microbatches=2))
        assert found.params_missing == () and max(found.loss_rel, found.grad_rel_max) < 1e-6


def test_a_loss_that_no_weights_make_and_what_a_user_may_say() -> None:
    """A product of means is computed once, over the whole batch."""
    one = verify(csc.compile(TimesAnother(), example=batch()))
    assert (one.grad_rel_max, one.params_missing) == (0, ())
    over_batch = verify(csc.compile(TimesAnother(), example=batch(), microbatches=2))
    assert over_batch.params_missing == () and max(over_batch.loss_rel, over_batch.grad_rel_max) < 1e-6
    two = csc.compile(TimesAnother(), example=batch(), microbatches=2, loss_weight="mean")
    assert two.program.loss_weight == "mean", "as the user says"


class Squared(Base):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.first(x), x)


def test_a_loss_weight_that_does_not_fit() -> None:
    refused(
        lambda: csc.compile(Base(), loss_weight="maximum"), "'maximum'", "compile", "'auto', 'tokens', 'mean' or 'sum'"
    )
    refused(
        lambda: csc.compile(Squared(), example=batch(), loss_weight="tokens"),
        "no mean over labels", "loss_weight='tokens'", "use loss_weight='mean' or 'sum'",
    )  # fmt: skip


def test_a_loss_that_is_not_a_number_leaves_the_gradients_alone(models: Models) -> None:
    compiled = models("text", mesh="pp=2", microbatches=2)
    good = small.text_batch(4)
    compiled.train_step(good)
    before = {name: p.grad.clone() for name, p in compiled.named_parameters()}
    nothing = with_entry(good, labels=torch.cat([good["labels"][:2], torch.full_like(good["labels"][2:], -100)]))
    nothing["labels"][:2] = -100
    refused(lambda: compiled.train_step(nothing), "is not finite", "step", "No gradient was touched")
    assert before
    assert all(torch.equal(p.grad, before[name]) for name, p in compiled.named_parameters())
    weight = compiled.model.norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("inf"))
    try:
        refused(lambda: compiled.train_step(good), "is not finite (nan)", "step", "No gradient was touched")
        assert all(torch.equal(p.grad, before[name]) for name, p in compiled.named_parameters())
    finally:
        with torch.no_grad():
            weight.copy_(kept)
        compiled.zero_grad()
