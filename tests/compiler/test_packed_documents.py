"""Documents that are packed into rows, as collators give them: `cu_seq_lens_q`, `max_length_q`, `varlen_attn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import csc
from csc.analysis.samples.combining import proven
from csc.capture.capture import capture
from csc.capture.guards import Guards
from csc.capture.trace import export
from csc.errors import InputError
from tests.compiler.test_dividing import same, step_is_eager
from tests.exactness import FLOAT32
from tests.tiers import BEFORE_2_13, long

Batch = dict[str, Any]


def flattened(*lengths: int) -> Batch:
    """One row, as Hugging Face's collator makes it for flash kernels."""
    generator = torch.Generator().manual_seed(sum(lengths))
    samples = [{"input_ids": torch.randint(1, 90, (length,), generator=generator).tolist()} for length in lengths]
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)(samples)


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=90, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


@pytest.mark.parametrize("mesh", ["pp=2", long("pp=1"), long("cp=2")])
def test_one_row_of_a_flattening_collator(mesh: str) -> None:
    """Each step has documents of other lengths, and another longest one."""
    compiled = same(llama(), flattened(5, 9, 4, 6), 1e-9, mesh=mesh)
    step_is_eager(compiled, flattened(7, 3, 14), 1e-9)


def test_rows_of_a_flattening_collator_are_microbatches() -> None:
    """Each of its own documents; one row alone is refused, and the sentence says that."""
    first, second = flattened(5, 9, 4, 6), flattened(7, 3, 14)
    compiled = csc.compile(llama(), example=[first, second], mesh="pp=2", microbatches=2)
    both = {name: torch.cat([first[name], second[name]]) for name in ("input_ids", "labels", "position_ids")}
    step_is_eager(compiled, both, FLOAT32, [first, second])  # the library's loss is in float32
    with pytest.raises(InputError, match=r"one row of 4 packed documents, and 2 .*\[collator\(samples\[i::2\]\) for i"):
        compiled.train_step(first)


class Packed(nn.Module):
    """Reads where documents begin, in its attention and for a weight of each; window: how far back it sees."""

    def __init__(self, varlen: bool = False, window: int = -1) -> None:
        super().__init__()
        self.varlen, self.window = varlen, window
        self.embed, self.qkv, self.out = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(16, 50)
        self.norm = nn.LayerNorm(16)

    def forward(
        self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor, max_seqlen: int, weights: Tensor | None = None
    ) -> Tensor:
        hidden = self.embed(input_ids)
        rows = self.qkv(self.norm(hidden)).flatten(0, 1)
        q, k, v = rows[:, :16].view(-1, 2, 8), rows[:, 16:24].view(-1, 1, 8), rows[:, 24:].view(-1, 1, 8)
        places = torch.arange(rows.shape[0], device=rows.device)
        document = torch.bucketize(places, cu_seqlens[1:], right=True)
        if self.varlen:
            attended = varlen_attn(
                q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=(self.window, 0), enable_gqa=True
            )
        else:
            seen = (document[:, None] == document) & (places[:, None] >= places)
            seen = seen & (places[:, None] - places <= self.window) if self.window >= 0 else seen
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, seen[None, None], enable_gqa=True)[0].transpose(0, 1)
        logits = self.out(hidden + attended.reshape(hidden.shape))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses if weights is None else losses * weights[document]).sum() / labels.numel()


def packed(*lengths: int, rows: int = 2, weights: bool = False) -> Batch:
    total, generator = sum(lengths), torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(50, (rows, total // rows), generator=generator)
    ends = torch.tensor(lengths).cumsum(0).int()
    more = {"weights": torch.rand(len(lengths), generator=generator, dtype=torch.float64)} if weights else {}
    return {"input_ids": ids, "labels": ids, "cu_seqlens": F.pad(ends, (1, 0)), "max_seqlen": max(lengths), **more}


def model(**options: Any) -> Packed:
    torch.manual_seed(0)
    return Packed(**options).double()


@pytest.mark.parametrize("options", [{"microbatches": 2}, long({"mesh": "dp=2"})])
@pytest.mark.parametrize("weights", [True, long(False)])
def test_beginnings_are_cut_with_their_documents(options: dict[str, Any], weights: bool) -> None:
    """And an entry with a value for each document, which nothing but its length tells. One attention is over the tokens
    of all samples, so that nothing but the mask, which is data, keeps these apart: how losses combine has to be said.
    """
    compiled = same(model(), packed(5, 7, 12, weights=weights), 1e-9, loss_weight="mean", **options)
    step_is_eager(compiled, packed(3, 4, 1, 4, 12, weights=weights), 1e-9)


def numbers_of(places: Tensor, begins: Tensor) -> Tensor:
    return torch.bucketize(places, begins[1:], right=True)


NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bucketize": numbers_of,
    "searchsorted": lambda places, begins: torch.searchsorted(begins.long(), places, right=True) - 1,
}
WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "left": lambda places, begins: torch.bucketize(places, begins[1:]),
    "all": lambda places, begins: torch.bucketize(places, begins, right=True),
    "every second": lambda places, begins: torch.bucketize(places, begins[1::2], right=True),
    "from the third": lambda places, begins: torch.bucketize(places, begins[2:], right=True),
    "not the last": lambda places, begins: torch.bucketize(places, begins[1:-1], right=True),
    "of half the places": lambda places, begins: numbers_of(places // 2, begins),
    "of the next place": lambda places, begins: numbers_of(places + 1, begins),
    "twice": lambda places, begins: 2 * numbers_of(places, begins),
    "the one before": lambda places, begins: numbers_of(places, begins) - 1,
}


class Rewarded(nn.Module):
    """A policy's loss: of each document a mean over its tokens, and a term of each token with its document's reward."""

    def __init__(self, numbers: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.numbers, self.embed, self.head = numbers, nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor, reward: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        document = self.numbers(torch.arange(losses.numel(), device=losses.device), cu_seqlens)
        sums = torch.zeros_like(reward).index_add(0, document, losses)
        lengths = torch.zeros_like(reward).scatter_add(0, document, torch.ones_like(losses))
        means = sums / lengths.clamp(min=1)
        return (means * reward).sum() + (losses * (reward - means)[document]).sum()


def rewarded(*lengths: int) -> Batch:
    batch = {name: tensor for name, tensor in packed(*lengths).items() if name != "max_seqlen"}
    return batch | {"reward": torch.arange(1.0, len(lengths) + 1)}


@pytest.mark.parametrize("name", ["bucketize", long("searchsorted")])
def test_losses_over_rows_of_documents_are_added_up(name: str) -> None:
    """Each document's rows lie in one microbatch, whose documents count from there."""
    compiled = same(Rewarded(NUMBERS[name]), rewarded(5, 7, 12), FLOAT32, microbatches=2)
    assert compiled.program.loss_weight == "sum"
    step_is_eager(compiled, rewarded(3, 4, 1, 4, 12), FLOAT32)


@pytest.mark.parametrize("name", WRONG)
def test_other_numbers_are_none_of_documents(name: str) -> None:
    program = capture(Rewarded(WRONG[name]), rewarded(5, 7, 12), Guards())
    problem = proven(program, program.graph)[0].problem
    assert problem and "bucketize" not in problem, "the operation before it is the one to name"


def test_a_document_across_two_microbatches_is_refused() -> None:
    with pytest.raises(InputError, match="'cu_seqlens' has a sequence that goes on across row 12"):
        csc.compile(model(), example=packed(5, 9, 10), microbatches=2).train_step(packed(5, 9, 10))


def test_beginnings_of_nothing_are_refused() -> None:
    batch = packed(5, 7, 12) | {"cu_seqlens": torch.tensor([0, 5, 11], dtype=torch.int32)}
    with pytest.raises(InputError, match="'cu_seqlens' says where sequences begin, the last of which ends at 11"):
        csc.compile(model(), example=batch, microbatches=2).train_step(batch)


@pytest.mark.parametrize(
    ("options", "rows"), [({"mesh": "cp=2"}, 1), long({"microbatches": 2, "loss_weight": "mean"}, 2)]
)
@pytest.mark.skipif(BEFORE_2_13, reason="varlen_attn has no enable_gqa")
@pytest.mark.parametrize("window", [3, long(-1)])
def test_varlen_attention_of_torch(options: dict[str, Any], rows: int, window: int) -> None:
    """It is an operator of CUDA alone, and csc's program runs anywhere; so the judge is the same by a mask."""
    right, batch = model(window=window), packed(5, 7, 12, rows=rows)
    compiled = csc.compile(model(varlen=True, window=window), example=batch, check=False, **options)
    loss = right(**batch)
    loss.backward()
    torch.testing.assert_close(compiled.train_step(batch), loss.detach())
    for (name, mine), other in zip(compiled.model.named_parameters(), right.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)


def test_varlen_attention_with_other_queries_than_keys() -> None:
    """The last query stands beside the last key, as in the kernel's bottom right causal mask."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 8, generator=generator, dtype=torch.float64) for n in (5, 9, 9))
    ends, of_keys = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 9])
    out, sums = export._varlen(q, k, v, ends, of_keys, is_causal=True, scale=0.3)
    for low, high, first, last in ((0, 2, 0, 4), (2, 5, 4, 9)):
        queries, keys = high - low, last - first
        seen = torch.ones(queries, keys).tril(keys - queries).bool()
        alone = [x.transpose(0, 1) for x in (q[low:high], k[first:last], v[first:last])]
        expected = F.scaled_dot_product_attention(*alone, seen, scale=0.3)
        torch.testing.assert_close(out[low:high], expected.transpose(0, 1))
        scores = (alone[0] @ alone[1].mT * 0.3).masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(sums[:, low:high].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="keys from a cache \\(block_table\\)"):
        export._varlen(q, k, v, ends, of_keys, block_table=ends)
