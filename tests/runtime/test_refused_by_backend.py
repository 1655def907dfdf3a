"""What a process group refuses is told as that, and only a lost connection as a lost rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import csc
from csc.errors import CscError, RankLost
from csc.runtime.meeting import Meeting, answering, is_lost
from tests.launching import ranks

LOST = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:12999: Connection reset by peer",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for send operation",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234",
    "Application timeout caused pair closure",
    "wait timeout after 8000ms, keys: /default_pg/0//cpu//0/0",
    "Broken pipe",
    "NCCL communicator was aborted on rank 1.",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
)
REFUSED = (
    "Invalid scalar type",
    "Input tensor data type is not supported for NCCL process group: Float8_e4m3fn",
    "Unconvertible NCCL type Short",
    "Tensors must be contiguous",
    "No backend type associated with device type meta",
    "ProcessGroupGloo does not support reduce_scatter with AVG",
)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():  # a meeting that broke has closed it
        dist.destroy_process_group()


def test_only_lost_connections_are_a_lost_rank() -> None:
    assert [said for said in LOST if not is_lost(RuntimeError(said))] == []
    assert [said for said in REFUSED if is_lost(RuntimeError(said))] == []
    assert is_lost(dist.DistBackendError("unhandled system error"))
    assert not is_lost(dist.DistBackendError(REFUSED[1]))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16], ids=str)
def test_what_gloo_does_not_sum(dtype: torch.dtype) -> None:
    numbers = torch.zeros(4).to(dtype)
    said = r"does not do 'weights were sent' \(Invalid scalar type\).*bfloat16"
    with pytest.raises(CscError, match=said) as told, answering("rank 1", "weights were sent"):
        dist.all_reduce(numbers)
    assert not isinstance(told.value, RankLost)
    with pytest.raises(CscError, match=r"rank 0: the process group .*gloo.* does not do 'train_step'") as told:
        Meeting(dist.group.WORLD).guarded(lambda: dist.all_reduce(numbers), "train_step")
    assert not isinstance(told.value, RankLost)


class Quantized(nn.Module):
    """Frozen weights of dtypes that gloo does not take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.coarse = nn.Parameter(torch.randn(8, 8).to(torch.float8_e4m3fn), requires_grad=False)
        self.steps = nn.Parameter(torch.arange(8, dtype=torch.int16), requires_grad=False)
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x) @ self.coarse.float()) * self.steps
        return self.head(x).pow(2).mean()


def train() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, batch = Quantized(), {"x": torch.randn(4, 8)}
    right = model(**batch).detach()
    compiled = csc.compile(model, example=batch, mesh="dp=2", zero=3, cache=False)
    torch.testing.assert_close(compiled.train_step(batch), right)
    saved, whole = compiled.gather().state_dict(), Quantized()
    assert torch.equal(saved["coarse"].view(torch.uint8), whole.coarse.view(torch.uint8))
    assert torch.equal(saved["steps"], whole.steps)


@pytest.mark.gloo
def test_frozen_weights_of_every_dtype_in_shards() -> None:
    ranks(train, 2)
