"""What csc proves of a loss holds in eager PyTorch: that of a batch is a weighted sum of those of its microbatches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.autograd import Function
from torch.nn import functional as F

from csc.analysis.operators.table import LABELS
from csc.analysis.samples.combining import assumed, combination, proven
from csc.capture.capture import capture, with_sizes_of
from csc.capture.guards import Guards
from csc.errors import CscError
from csc.ir import graph as g
from csc.ir.program import Combination, Divisor, Program

SAMPLES, LENGTH, WIDTH, CLASSES = 6, 4, 3, 5
Loss = Callable[..., torch.Tensor]


class Model(nn.Module):
    """hands `loss` the hidden values h, the logits x, the labels y, cross entropies of tokens p, the mask m of labelled
    tokens and weights w of samples.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.loss = loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.embed(ids))
        x = self.head(h)
        p = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return self.loss(h=h, x=x, y=labels, p=p, m=labels != -100, w=weights, head=self.head)


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels[0, :3] = labels[4, 2:] = -100
    return {"ids": ids, "labels": labels, "weights": torch.rand(SAMPLES, generator=generator) + 0.1}


def captured(loss: Loss) -> tuple[nn.Module, Program, Combination]:
    model = Model(loss)
    guards = Guards()
    program = capture(model, {name: tensor[:3] for name, tensor in batch().items()}, guards)
    assert program.guards is not None
    guards.add(program.guards)
    found, always = proven(program, program.graph)
    for samples, length in ((2, 7), (CLASSES, 8), (9, WIDTH)) if always else ():
        resized = {name: torch.ones((samples, length)[: one.dim()], dtype=one.dtype) for name, one in batch().items()}
        if guards.match(model, resized).capture is not None:
            other = with_sizes_of(program, resized)
            assert (combination(other, other.graph), assumed(other)) == (found, assumed(program))
    return model, program, found


def values_of(model: nn.Module, program: Program, part: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    parameters = dict(model.named_parameters())
    sources: dict[str, Any] = {"input": part, "parameter": parameters, "constant": program.constants}
    return [sources[n.meta["role"][0]][n.meta["role"][1]] for n in g.placeholders(program.graph)]


def counts(model: nn.Module, program: Program, divisor: Divisor, part: dict[str, torch.Tensor]) -> float:
    """What a microbatch weighs by, before it is divided by the sum: from running the traced graph itself."""
    if divisor.rows:
        return float(part[divisor.rows].shape[0])
    node = next(one for one in program.graph.nodes if one.name == divisor.counted)
    interpreter = fx.Interpreter(fx.GraphModule({}, program.graph), garbage_collect_values=False)
    interpreter.run(*values_of(model, program, part))
    if g.op_name(node) not in LABELS:
        return float(interpreter.env[node])
    labels, weight = (g.bind(node)[which] for which in ("target", "weight"))
    labels = interpreter.env[labels]
    weights = interpreter.env[weight] if weight is not None else torch.ones(CLASSES)
    return float(weights[labels[labels != -100]].sum())


class Weighing(fx.Interpreter):
    """Multiplies operands of the calls of these names; what weighs nothing is nothing, NaN too."""

    def __init__(self, graph: fx.Graph, weights: dict[tuple[str, int], float]) -> None:
        super().__init__(fx.GraphModule({}, graph))
        self.weights = weights

    def weighed(self, call: str, value: Any, place: int) -> Any:
        if isinstance(value, list):
            return [self.weighed(call, one, i) for i, one in enumerate(value)]
        if (call, place) not in self.weights:
            return value
        weight = self.weights[call, place]
        return torch.as_tensor(value) * weight if weight else torch.zeros(())

    def run_node(self, n: fx.Node) -> Any:
        values, keywords = self.fetch_args_kwargs_from_env(n)
        for place in range(len(values)):
            values = (*values[:place], self.weighed(n.name, values[place], place), *values[place + 1 :])
        target = torch.ops.aten.rsub.Tensor if n.target is torch.ops.aten.rsub.Scalar else n.target
        if target is torch.ops.aten.rsub.Tensor:
            values = tuple(map(torch.as_tensor, values))
        return getattr(self, n.op)(target, values, keywords)


def losses(
    model: nn.Module, program: Program, found: Combination, parts: list[dict[str, torch.Tensor]]
) -> list[torch.Tensor]:
    """Of parts of a batch, as they are added up."""
    if found.weight == "sum":
        return [model(**part) for part in parts]
    divisors = found.divisors or (
        Divisor("" if found.counted else found.rows, found.counted, found.added, found.least),
    )
    shares = {}
    for one in divisors:
        own = [counts(model, program, one, part) for part in parts]
        divided = [max(count + one.added, one.least) for count in [*own, sum(own)]]
        shares[one] = [count / divided[-1] for count in divided[:-1]]
    if found.weight != "terms":
        (weights,) = shares.values()
        return [model(**part) * weight for part, weight in zip(parts, weights) if weight]
    found_losses = []
    for place, part in enumerate(parts):
        weights = {(term.call, term.operand): shares[term.divisor][place] for term in found.terms}
        found_losses.append(Weighing(program.graph, weights).run(*values_of(model, program, part))[0])
    return found_losses


def holds(model: nn.Module, program: Program, found: Combination, cuts: list[int]) -> bool:
    """Whether loss and gradients of the batch are those of its parts, weighted as was found."""
    whole = batch()
    edges = [0, *cuts, SAMPLES]
    parts = [{name: t[a:b] for name, t in whole.items()} for a, b in pairwise(edges)]

    def gradients(losses: list[torch.Tensor]) -> list[torch.Tensor]:
        total = torch.stack(losses).sum()
        model.zero_grad()
        total.backward()
        return [total.detach(), *(p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())]

    of_parts = gradients(losses(model, program, found, parts))
    return all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(gradients([model(**whole)]), of_parts)
    )


def weighed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=torch.linspace(1, 2, CLASSES))


class Limited(Function):
    """h * scale, whose backward limits the gradient: that of each entry, or that of the whole batch."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, scale: torch.Tensor, whole: bool) -> torch.Tensor:
        ctx.save_for_backward(h, scale)
        ctx.whole = whole
        return h * scale

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        (d,) = incoming
        h, scale = ctx.saved_tensors
        size = torch.linalg.vector_norm(d) if ctx.whole else d.abs()
        return d * scale / (0.01 + size), (d * h).sum((0, 1)), None


class Shared(Function):
    """h * scale, with a gradient for the scale that is the same whatever comes in."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return h * scale

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return incoming[0] * scale, scale.square()


def hooked(h: torch.Tensor) -> torch.Tensor:
    h = h * 2
    h.register_hook(lambda d: d.clamp(-0.005, 0.005))
    return h.square().mean()


def turned(h: torch.Tensor) -> torch.Tensor:
    z = torch.view_as_complex(h[..., :2].contiguous()) * (1 + 0.1j)
    z = z.conj() * torch.polar(torch.ones(LENGTH), torch.arange(float(LENGTH)))
    return (torch.view_as_real(z).square().sum(-1) + z.real + z.abs() * z.imag).mean()


def normed(h: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(h.transpose(1, 2), mean, torch.full((WIDTH,), 2.0)).square().mean()


def by_expert(
    h: torch.Tensor, y: torch.Tensor, work: Callable[[torch.Tensor], torch.Tensor], choices: int = 1
) -> torch.Tensor:
    """What work makes of a token's rows, one for each choice, sorted by expert and put back."""
    order = y.clamp(min=0).flatten().repeat_interleave(choices).sort()[1]
    made = work(h.flatten(0, 1)[order // choices] if choices > 1 else h.flatten(0, 1)[order])
    return made[order.argsort()].view(*h.shape[:2], choices, -1).sum(2)


PROVEN: dict[str, tuple[str, Loss]] = {
    "over len": ("mean", lambda p, y, **_: p.sum() / len(y)),
    "each over len": ("mean", lambda p, y, **_: (p / len(y)).sum()),
    "times len": ("sum", lambda p, y, **_: p.mean() * len(y)),
    "a backward that limits each entry": (
        "mean", lambda h, head, **_: Limited.apply(h, head.weight[0], False).square().mean()
    ),
    "a sum before a backward of its own": (
        "sum", lambda h, head, **_: Limited.apply(h, head.weight[0], False).square().sum()
    ),
    "a hook that limits": ("mean", lambda h, **_: hooked(h)),
    "complex values": ("mean", lambda h, **_: turned(h)),
    "a spectrum of each": ("mean", lambda h, **_: torch.fft.rfft(h, dim=1).abs().mean()),
    "slopes": ("mean", lambda h, head, **_: F.prelu(h.transpose(1, 2), head.weight[0]).square().mean()),
    "running statistics": ("mean", lambda h, **_: normed(h, torch.full((WIDTH,), 0.1))),
    "cross entropy": ("tokens", lambda x, y, **_: F.cross_entropy(x.flatten(0, 1), y.flatten())),
    "smoothed": ("tokens", lambda x, y, **_: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1)),
    "weights of classes": ("tokens", lambda x, y, **_: weighed(x, y)),
    "probabilities": ("mean", lambda x, **_: F.cross_entropy(x.flatten(0, 1), torch.full_like(x, 0.2).flatten(0, 1))),
    "a sum over shape[0]": (
        "mean", lambda x, y, **_: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[0]
    ),
    "a sum over numel": ("mean", lambda p, **_: p.sum() / p.numel()),
    "a sum": ("sum", lambda p, **_: p.sum()),
    "a mean times shape[0]": ("sum", lambda p, **_: p.mean() * p.shape[0]),
    "mean(0).sum()": ("mean", lambda p, **_: p.mean(0).sum()),
    "sum(0).mean()": ("sum", lambda p, **_: p.sum(0).mean()),
    "sum(1).mean()": ("mean", lambda p, **_: p.sum(1).mean()),
    "a mask over its sum": ("tokens", lambda p, m, **_: (p * m).sum() / m.sum()),
    "a mask over its sum, not zero": ("tokens", lambda p, m, **_: (p * m).sum() / m.sum().clamp(min=1)),
    "a mask over its sum and a little": ("tokens", lambda p, m, **_: (p * m).sum() / (m.sum() + 0.5)),
    "normalised weights": ("tokens", lambda p, w, **_: (p.mean(1) * (w / w.sum())).sum()),
    "weights": ("mean", lambda p, w, **_: (p.mean(1) * w).mean()),
    "a mean for each sample": ("mean", lambda p, m, **_: ((p * m).sum(1) / m.sum(1).clamp(min=1)).mean()),
    "two means": ("mean", lambda p, h, **_: p.mean() + 0.1 * h.square().mean()),
    "a mean and decay": ("mean", lambda p, head, **_: p.mean() + 0.1 * head.weight.square().sum()),
    "means over different numbers": (
        "terms", lambda x, y, h, **_: F.cross_entropy(x.flatten(0, 1), y.flatten()) + h.square().mean()
    ),
    "a sum and decay": ("terms", lambda p, head, **_: p.sum() + head.weight.square().sum()),
    "a sum and a number": ("terms", lambda p, **_: p.sum() + 0.5),
    "a number less a sum": ("terms", lambda p, **_: 0.5 - p.sum()),
    "a sum and a mean": ("terms", lambda p, h, **_: p.sum() + 10 * h.square().mean()),
    "three numbers": (
        "terms",
        lambda p, m, w, h, **_: -((p * m).sum() / m.sum() - p.mean() / 3 + (h.mean(2).mean(1) * w).sum() / w.sum()) / 2,
    ),
    "two of one number, and another": (
        "terms", lambda p, m, h, **_: (p * m).sum() / m.sum() + h.square().mean() + (p * m).sum().mul(2) / m.sum()
    ),
    "a term twice": ("terms", lambda p, w, **_: (lambda a, b: a + b + a)(p.mean(), p.mean(1).dot(w) / w.sum())),
    "terms of terms": (
        "terms", lambda p, m, w, **_: (p.mean() + p.mean(1).dot(w) / w.sum()) * 0.3 + (p * m).sum() / m.sum()
    ),
    "terms and decay": (
        "terms", lambda p, w, head, **_: p.mean() + p.mean(1).dot(w) / w.sum() + 0.1 * head.weight.square().sum()
    ),
    "a number not zero, and a mean": (
        "terms", lambda p, m, h, **_: (p * m).sum() / m.sum().clamp(min=1) + h.square().mean()
    ),
    "terms of a loop": (
        "terms", lambda p, w, m, **_: sum(p.mean(1).dot(one) / one.sum() for one in (w, w.square(), m.sum(1).float()))
    ),
    "copies and a mean": (
        "terms", lambda p, head, **_: head.weight[:1].repeat(p.shape[0], 1).sum() * 0.1 + p.mean()
    ),
    "one row beside": ("terms", lambda p, head, **_: torch.stack([p.sum(), head.weight.sum()]).sum()),
    "stacked, each times a number": (
        "terms", lambda p, w, **_: (torch.stack([p.mean(), p.sum(), w.mean()]) * p.new_tensor([1, 2, 3])).mean()
    ),
    "with alpha": ("terms", lambda p, w, **_: torch.add(p.mean(), p.mean(1).dot(w) / w.sum(), alpha=0.3)),
    "one minus terms": ("terms", lambda p, w, **_: 1 - (p.mean() - p.mean(1).dot(w) / w.sum())),
    "one minus a mean": ("mean", lambda h, **_: 1 - h.mean()),
    "mse": ("mean", lambda h, w, **_: F.mse_loss(h, w[:, None, None].expand_as(h))),
    "kl, batchmean": (
        "mean", lambda x, **_: F.kl_div(x.log_softmax(-1), torch.full_like(x, 0.2), reduction="batchmean")
    ),
    "the best tokens of each": ("mean", lambda p, **_: p.topk(2, dim=1).values.mean()),
    "attention": ("mean", lambda h, **_: F.scaled_dot_product_attention(h, h, h).mean()),
    "a copy for each sample": (
        "mean", lambda h, head, **_: (h[:, 0] * head.weight[:1].repeat(h.shape[0], 1)).mean()
    ),
    "log-likelihoods": ("mean", lambda x, y, **_: -x.log_softmax(-1).gather(2, y.clamp(min=0)[..., None]).mean()),
    "einsum": ("sum", lambda h, w, **_: torch.einsum("ntd,n->td", h, w).sum()),
    "a matrix of samples": ("sum", lambda h, w, **_: (w @ h.flatten(1)).sum()),
    "twice the batch": ("mean", lambda h, **_: torch.cat([h, h * 2]).square().mean()),
    "einsum with dots": (
        "mean", lambda h, head, **_: torch.einsum("...d,cd->...c", h, head.weight).square().mean()
    ),
    "einsum of two with dots": ("mean", lambda h, **_: torch.einsum("...id,...jd->...ij", h, h).mean()),
    "einsum without a result": ("mean", lambda h, head, **_: torch.einsum("ntd,dc", h, head.weight.T).square().mean()),
    "tensordot": ("mean", lambda h, head, **_: torch.tensordot(h, head.weight, ([2], [1])).square().mean()),
    "tile": ("mean", lambda h, **_: h.tile((1, 2, 1)).square().mean()),
    "a tile for each sample": (
        "mean", lambda h, head, **_: (h[:, 0] * head.weight[:1].tile((h.shape[0], 1))).mean()
    ),
    "a recurrent cell": (
        "mean", lambda h, **_: torch.gru_cell(h[:, 0], h[:, 1], torch.ones(9, 3), torch.ones(9, 3)).mean()
    ),
    "rows added": ("mean", lambda h, **_: h.index_add(1, torch.tensor([0, 2]), h[:, :2]).square().mean()),
    "rows copied": ("mean", lambda h, **_: h.index_copy(1, torch.tensor([0, 2]), h[:, 1:3]).square().mean()),
    "bilinear": ("mean", lambda h, **_: F.bilinear(h, h, torch.ones(2, WIDTH, WIDTH)).square().mean()),
    "log sigmoid": ("mean", lambda h, **_: F.logsigmoid(h).mean()),
    "the second of each": ("mean", lambda h, **_: h.kthvalue(2, dim=1).values.mean()),
    "the median of each": ("mean", lambda h, **_: h.median(dim=1).values.mean()),
    "a product of vectors": ("sum", lambda p, w, **_: torch.dot(p.mean(1), w)),
    "a matrix times a vector": ("mean", lambda h, head, **_: torch.mv(h[:, 0], head.weight[0]).square().mean()),
    "fold": ("mean", lambda h, **_: F.fold(h.repeat(1, 1, 4).view(-1, 12, 4), (3, 3), (2, 2)).square().mean()),
    "distances": ("mean", lambda h, head, **_: torch.cdist(h, head.weight[None]).mean()),
    "an inverse of each": ("mean", lambda h, **_: torch.linalg.inv(h.mT @ h + torch.eye(WIDTH)).mean()),
    "a triangle of each": ("mean", lambda h, **_: h.tril().square().mean()),
    "a deviation and a mean": ("mean", lambda h, **_: torch.std_mean(h, 1)[0].mean()),
    "sorted by expert": ("mean", lambda h, y, **_: by_expert(h, y, lambda rows: rows.square()).mean()),
    "sorted by expert, choices of each token": (
        "tokens", lambda h, y, m, **_: (by_expert(h, y, torch.tanh, 2).mean(-1) * m).sum() / m.sum()
    ),
    "each sample's own row": ("mean", lambda h, y, **_: h[torch.arange(h.shape[0]), (y != -100).sum(1) - 1].mean()),
}  # fmt: skip

REFUSED: dict[str, tuple[str, Loss]] = {
    "sorted rows beside each other": ("", lambda h, y, **_: by_expert(h, y, lambda r: r * r.roll(1, 0)).mean()),
    "sorted rows by their place": ("", lambda h, y, **_: by_expert(h, y, lambda r: r.cumsum(0)).mean()),
    "sorted rows beside those that are not": (
        "", lambda h, y, **_: by_expert(h, y, lambda r: r * h.flatten(0, 1)).mean()
    ),
    "sorted rows times what is summed": (
        "", lambda h, y, p, **_: by_expert(h, y, lambda r: r * p.square().sum()).mean()
    ),
    "sorted rows that are not put back": (
        "", lambda h, y, **_: (h.flatten(0, 1)[y.flatten().sort()[1]] * h.flatten(0, 1)).mean()
    ),
    "the least of all": ("", lambda p, **_: p.flatten().sort().values[0]),
    "how often the first is there": (
        "", lambda h, y, **_: h.mean() * torch.histc(y.flatten().float(), 4, 0, 3)[0].square()
    ),
    "a backward that limits the batch": (
        "", lambda h, head, **_: Limited.apply(h, head.weight[0], True).square().mean()
    ),
    "a gradient that is always the same": (
        "no sum of them", lambda h, head, **_: Shared.apply(h, head.weight[0]).square().mean()
    ),
    "a spectrum of all": ("along the samples", lambda h, **_: torch.fft.rfft(h, dim=0).abs().mean()),
    "statistics of the batch as running ones": (
        "combines every sample with every other", lambda h, **_: normed(h, h.detach().mean((0, 1)))
    ),
    "the best tokens of all": ("topk works along the samples", lambda p, **_: p.flatten().topk(3).values.mean()),
    "rows added to those of others": (
        "does more than scale what was summed over samples",
        lambda h, **_: torch.zeros(1, LENGTH, WIDTH).index_add(0, torch.zeros(h.shape[0]).long(), h).square().mean(),
    ),
    "a sum made as many as there are samples": (
        "combines every sample with every other", lambda h, **_: (torch.zeros(h.shape[0]) + h.sum()).sum()
    ),
    "a triangle of all": ("works along the samples", lambda p, **_: p.tril().mean()),
    "the median of all": ("", lambda h, **_: h.median()),
    "the second of all": ("works along the samples", lambda h, **_: h.kthvalue(1, dim=0).values.mean()),
    "tiles of all": ("", lambda h, **_: (h.tile((2, 1, 1)).cumsum(0)).mean()),
    "distances of samples": ("", lambda h, **_: torch.cdist(h.mean(1), h.mean(1)).mean()),
    "a sample for each dot": ("", lambda h, **_: torch.einsum("n...,m...->nm", h, h).mean()),
    "the logarithm of a mean": ("log does more than scale", lambda p, **_: p.mean().log()),
    "the square of a sum": ("square does more than scale", lambda p, **_: p.sum().square()),
    "the largest": ("amax", lambda p, **_: p.amax()),
    "a square of terms": ("does more than scale", lambda p, m, **_: (p.mean() + (p * m).sum() / m.sum()).square()),
    "terms over a number": ("does more than scale", lambda p, m, **_: (p.mean() + (p * m).sum() / m.sum()) / m.sum()),
    "a term over two numbers": (
        "by more than one of them", lambda p, m, y, **_: p.sum() / m.sum() / (y > 1).sum() + p.mean()
    ),
    "the larger term": ("", lambda p, m, **_: torch.maximum(p.mean(), (p * m).sum() / m.sum())),
    "copies of terms": (
        "does more than scale", lambda p, m, **_: (p.mean() + (p * m).sum() / m.sum()).expand(p.shape[0]).sum()
    ),
    "terms by samples": ("", lambda p, m, **_: ((p.mean() + (p * m).sum() / m.sum()) * p).mean()),
    "centred": ("combines every sample with every other", lambda h, **_: (h - h.mean(0)).square().mean()),
    "cumsum": ("cumsum works along the samples", lambda p, **_: p.cumsum(0).mean()),
    "softmax": ("softmax works along the samples", lambda p, **_: (p.softmax(0) * p).mean()),
    "contrast": (
        "", lambda h, **_: F.cross_entropy(h.mean(1) @ h.mean(1).T, torch.arange(h.shape[0], device=h.device))
    ),
    "neighbours": ("roll works along the samples", lambda h, **_: (h * h.roll(1, 0)).mean()),
    "turned": ("flip works along the samples", lambda h, **_: (h * h.flip(0)).mean()),
    "a covariance": ("does more than scale", lambda h, **_: (h.flatten(1).T @ h.flatten(1)).square().mean()),
    "without the first": ("takes some of the samples", lambda p, **_: p[1:].mean()),
    "a shuffle of memory": ("joins or cuts samples", lambda h, **_: (h.flatten(1).view(-1, h.shape[0])[0]).mean()),
    "one row for all": ("puts something behind", lambda h, **_: torch.cat([h[:, 0], h.new_zeros(1, WIDTH)]).mean()),
    "every sample with every other": ("", lambda p, **_: (p[:, None] * p[None]).mean()),
    "a table as long": ("takes as much", lambda p, head, **_: p.mean() + head.weight.flatten()[: p.shape[0]].sum()),
    "as many columns": ("takes as much", lambda x, **_: x.flatten(1)[:, : x.shape[0]].mean()),
    "copies of a sum": ("", lambda p, **_: p.mean().expand(p.shape[0]).sum() + p.mean()),
    "the number of samples": ("", lambda p, **_: p.sum() / (p.shape[0] + 1)),
    "another number": ("", lambda p, **_: p.sum() / (p.shape[0] // 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVEN)
def test_what_a_loss_is_divided_by_is_found(name: str) -> None:
    weight, loss = PROVEN[name]
    model, program, found = captured(loss)
    assert (found.problem, found.weight) == ("", weight)
    assert holds(model, program, found, [1, 3])


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_samples_is_found(name: str) -> None:
    why, loss = REFUSED[name]
    model, program, found = captured(loss)
    assert found.weight == "" and why in found.problem
    assert "test_samples.py" in found.where
    assert not any(holds(model, program, Combination(weight, "ids"), [1, 3]) for weight in ("mean", "sum"))


FIXED: dict[str, Loss] = {  # int(...) makes a plain number of what the number of samples is
    "over a number": lambda p, y, **_: p.sum() / int(y.shape[0]),
    "each over a number": lambda p, y, **_: (p / int(y.shape[0])).sum(),
    "times a number": lambda p, y, **_: p.mean() * int(y.shape[0]),
    "over ones": lambda p, y, **_: p.sum() / p.new_ones(int(y.shape[0])).sum(),
    "one by one": lambda p, y, **_: sum((p[i].mean() for i in range(len(y))), p.new_zeros(())) / len(y),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_trace_for_one_number_of_samples_proves_nothing_of_it(name: str) -> None:
    _, _, found = captured(FIXED[name])
    assert found.weight == "" and "one number of samples" in found.problem


def test_a_proof_is_for_all_sizes_where_none_is_that_of_another() -> None:
    _, program, _ = captured(lambda p, y, w, **_: (p.mean(1) * w).sum() / (y != -100).sum())
    assert [alone(program, samples, length) for samples, length in ((2, 7), (2, 10), (2, 1))] == [True, False, False]


def alone(program: Program, samples: int, length: int) -> bool:
    shapes = {one.name: (samples, length)[: len(one.shape)] for one in program.inputs}
    sized = with_sizes_of(program, {name: torch.empty(shape) for name, shape in shapes.items()})
    return proven(sized, sized.graph)[1]


def test_rows_that_are_all_the_same_may_be_of_a_plain_number() -> None:
    def loss(x: torch.Tensor, y: torch.Tensor, **_: Any) -> torch.Tensor:
        ignored = y.new_full((int(y.shape[0]), 1), -100)
        return F.cross_entropy(x.transpose(1, 2), torch.cat([ignored, y[:, 1:]], 1))

    _, _, found = captured(loss)
    assert (found.weight, found.problem) == ("tokens", "")


VALUES: list[tuple[str, Callable[..., torch.Tensor]]] = [
    ("p", lambda p, **_: p), ("p * m", lambda p, m, **_: p * m), ("p * w", lambda p, w, **_: p * w[:, None]),
    ("h", lambda h, **_: h.square().mean(-1)), ("w", lambda p, w, **_: p * (w / w.sum())[:, None]),
    ("x", lambda x, **_: x.logsumexp(-1)),
]  # fmt: skip
CHANGES: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("same", lambda t: t), ("tanh", torch.tanh), ("centred 0", lambda t: t - t.mean(0)),
    ("centred 1", lambda t: t - t.mean(1, keepdim=True)), ("cumsum 0", lambda t: t.cumsum(0)),
    ("cumsum 1", lambda t: t.cumsum(1)), ("softmax 1", lambda t: t.softmax(1)), ("cut", lambda t: t[:, 1:]),
    ("rest", lambda t: t[1:]), ("turned", lambda t: t.flip(1)), ("upside down", lambda t: t.flip(0)),
    ("over n", lambda t: t / t.shape[0]), ("halves", lambda t: t.reshape(t.shape[0], -1, 1).squeeze(2)),
    ("twice", lambda t: torch.cat([t, t])), ("beside", lambda t: torch.cat([t, t], 1)),
    ("sorted", lambda t: t.sort(0)[0]),
    ("normed", lambda t: t / t.sum(1, keepdim=True)), ("normed 0", lambda t: t / t.sum(0)),
    ("pairs", lambda t: t.flatten().view(-1, 2)), ("gram", lambda t: t @ t.T), ("columns", lambda t: t.T @ t),
]  # fmt: skip
ENDS: list[tuple[str, Callable[..., torch.Tensor]]] = [
    ("mean", lambda t, **_: t.mean()), ("sum", lambda t, **_: t.sum()),
    ("mean(0).sum()", lambda t, **_: t.mean(0).sum()),
    ("sum(0).mean()", lambda t, **_: t.sum(0).mean()), ("over n", lambda t, **_: t.sum() / t.shape[0]),
    ("over labels", lambda t, m, **_: t.sum() / m.sum()), ("times n", lambda t, **_: t.mean() * t.shape[0]),
    ("largest", lambda t, **_: t.amax(1).mean()), ("all largest", lambda t, **_: t.amax()),
    ("var", lambda t, **_: t.var()), ("norm", lambda t, **_: t.norm()), ("std of each", lambda t, **_: t.std(1).sum()),
]  # fmt: skip
LATER: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("same", lambda t: t), ("half", lambda t: t * 0.5), ("and one", lambda t: t + 1), ("minus", lambda t: 1 - t),
    ("squared", torch.square), ("at least", lambda t: t.clamp(min=0.5)),
]  # fmt: skip


LARGEST = 1e8  # the square of a loss


@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
@given(
    st.sampled_from(VALUES), st.lists(st.sampled_from(CHANGES), max_size=2), st.sampled_from(ENDS),
    st.sampled_from(LATER), st.sampled_from([None, *ENDS]),
    st.lists(st.integers(1, SAMPLES - 1), min_size=1, max_size=3, unique=True).map(sorted),
)  # fmt: skip
def test_whatever_is_proven_holds(
    value: Any, changes: list[Any], end: Any, later: Any, other: Any, cuts: list[int]
) -> None:
    def loss(**given: Any) -> torch.Tensor:
        start = value[1](**given)
        t = start
        for _, change in changes:
            t = change(t)
        result = later[1](end[1](t, **given))
        return result if other is None else result + 0.3 * other[1](start, **given)

    try:
        model, program, found = captured(loss)
    except CscError:  # a refusal claims nothing
        reject()
    if not float(model(**batch())) ** 2 < LARGEST:  # divided by what adds up to zero: numbers without meaning
        reject()
    if found.weight:
        assert holds(model, program, found, cuts), (value[0], [name for name, _ in changes], end[0], later[0], found)
