"""One rank of the tests that write and read weights on two processes.

adapter(name, steps, directory)
checkpoint(directory)
meta(directory)
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import csc
from tests.compiler.peft_models import llama, peft_model, text_batch


def adapter(name: str, steps: int, directory: Path) -> None:
    """Train adapters, and write them."""
    batch = text_batch(2)
    compiled = csc.compile(peft_model(name), mesh="pp=2", example=batch)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    for _ in range(steps):
        compiled.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
        compiled.save_adapter(directory / "adapter")  # the first rank writes, which leaves traces in libraries there
    dist.destroy_process_group()


def checkpoint(directory: Path) -> None:
    """Read a checkpoint and write it again; every process then has the whole of it, if asked."""
    compiled = csc.compile(llama(tied=True), mesh="pp=2", example=text_batch(2))
    compiled.load(directory / "hf")
    compiled.save(directory / "csc")
    expected = LlamaForCausalLM.from_pretrained(directory / "hf").state_dict()
    found = compiled.gather().state_dict()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    loss = compiled.train_step(text_batch(2))
    if dist.get_rank() == 0:
        compiled.model.save_pretrained(directory / "own")  # type: ignore[operator]  # no change of the model
    assert torch.equal(compiled.train_step(text_batch(2)), loss)
    dist.destroy_process_group()


def meta(directory: Path) -> None:
    """The same with a model without weights: each process makes, reads and writes its own parameters alone."""
    with csc.meta_init():
        model = llama()
    compiled = csc.compile(model, mesh="pp=2", example=text_batch(2), directory=directory / "program")
    compiled.load(directory / "hf")
    rank = dist.get_rank()
    assert {p.name for p in (directory / f"program-rank{rank}").glob("rank_*.py")} == {f"rank_{rank}.py"}
    assert all(parameter.is_meta for parameter in compiled.model.parameters())
    expected = LlamaForCausalLM.from_pretrained(directory / "hf")
    own = compiled.state_dict()
    assert 0 < len(own) < len(expected.state_dict())
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in own.items())
    loss = compiled.train_step(text_batch(2))
    assert torch.allclose(loss, expected(**text_batch(2)).loss, rtol=1e-5)
    compiled.save(directory / "csc")
    dist.destroy_process_group()
