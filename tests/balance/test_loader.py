"""Steps from a loader: every sample once, whoever loads it; where it goes on; what is said when something is amiss."""

from __future__ import annotations

import gc
import io
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

from csc.balance.balanced import _check_last, _check_numbers, _samples_of
from csc.balance.loader import BalancedLoader, Collation, Counted, Decider, Delivery, EpochOrder
from csc.balance.sample_costs import read
from csc.errors import InputError
from tests.balance.captions import Captions, Sample, collate
from tests.balance.costs import costs

REPLICAS, MICROBATCHES, STEP = 2, 4, 16


def loader(
    dataset: Any, lengths: Any = None, order: EpochOrder | None = None, replicas: Iterable[int] = (0, 1),
    make: Any = collate, room: float | None = None, drop_last: bool = True, **options: Any,
) -> BalancedLoader:  # fmt: skip
    table = read(dataset.lengths if lengths is None else lengths, dataset)
    decider = Decider(table, costs(3, MICROBATCHES, room), False, REPLICAS, MICROBATCHES, 8)
    delivery = Delivery(Collation(dataset, make), decider, list(replicas), [Counted("pixel_values", 0, 4)])
    return BalancedLoader(delivery, order or EpochOrder(len(dataset), None, True, 5), STEP, drop_last, options)


def rows(steps: Iterable[list[Sample]]) -> list[list[tuple[int, ...]]]:
    """The texts of each step, sorted: which samples it has."""
    return [
        sorted(tuple(text[text > 0].tolist()) for one in step for text in one["input_ids"]) for step in steps
    ]  # fmt: skip


def texts(dataset: Any, indices: Iterable[int]) -> list[tuple[int, ...]]:
    return sorted(tuple(dataset[i]["input_ids"].tolist()) for i in indices)


def test_the_sampler_says_which_samples_a_step_has() -> None:
    dataset = Captions(40, lacking=True)
    found = loader(dataset)
    order = EpochOrder(40, None, True, 5)
    for epoch in range(2):
        steps = list(found)
        assert len(steps) == len(found) == 2
        assert all(len(step) == REPLICAS * MICROBATCHES for step in steps)
        assert rows(steps) == [texts(dataset, order.of(epoch)[k : k + STEP]) for k in (0, STEP)]
    assert order.of(0) != order.of(1) and sorted(order.of(1)) == list(range(40))


def test_ranks_have_their_replicas_samples_and_agree() -> None:
    dataset = Captions(48)
    whole, apart = list(loader(dataset)), [list(loader(dataset, replicas=[r])) for r in range(REPLICAS)]
    for step, first, second in zip(whole, *apart):
        assert step.said == first.said == second.said and "step" in step.said[0]
        for one, other in zip(step, [*first, *second], strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    other = list(loader(dataset, order=EpochOrder(48, None, True, 6)))
    assert other[0].said != whole[0].said


def begun(number: int) -> None:
    assert gc.get_freeze_count() > 10_000  # what the training process has is not looked through again
    Path(os.environ["CSC_BEGUN"], str(number)).touch()


def test_workers_decide_and_collate_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSC_BEGUN", str(tmp_path))
    dataset = Captions(64)
    one, two = list(loader(dataset)), list(loader(dataset, num_workers=2, worker_init_fn=begun))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert [step.said for step in one] == [step.said for step in two]
    assert rows(one) == rows(two)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.long_cases("2-True")
def test_a_position_is_taken_up_in_the_middle(sampled: bool, workers: int) -> None:
    dataset = Captions(80)

    def order() -> EpochOrder:
        random = torch.randperm(80, generator=torch.Generator().manual_seed(7)).tolist()
        return EpochOrder(80, random, False, 0) if sampled else EpochOrder(80, None, True, 5)

    whole = loader(dataset, order=order())
    steps, state = [], {}
    for number, step in enumerate(whole):
        steps.append(step)
        if number == 1:
            content = io.BytesIO()
            torch.save(whole.state_dict(), content)
            content.seek(0)
            state = torch.load(content, weights_only=True)
    again = loader(dataset, order=order(), num_workers=workers)
    again.load_state_dict(state)
    assert rows(again) == rows(steps[2:])
    assert rows(again) == rows(whole)  # the next epoch


def test_a_position_of_another_loader() -> None:
    state = loader(Captions(80)).state_dict()
    with pytest.raises(InputError, match="the position is of a loader with samples 80, and this one has 64"):
        loader(Captions(64)).load_state_dict(state)
    with pytest.raises(InputError, match="with seed 5, and this one has 6"):
        loader(Captions(80), order=EpochOrder(80, None, True, 6)).load_state_dict(state)
    with pytest.raises(InputError, match="no position of a balanced loader"):
        loader(Captions(80)).load_state_dict({"given": 3})
    fresh = loader(Captions(80))
    next(iter(fresh))
    fresh.set_epoch(0)
    assert fresh.state_dict()["step"] == 1
    fresh.set_epoch(1)
    assert (fresh.state_dict()["epoch"], fresh.state_dict()["step"]) == (1, 0)


class Dying(Captions):
    """Whose worker is ended while it loads a sample of the second step, once the first one has been taken; as often as
    a file says.
    """

    def __init__(self, count: int, file: Path, times: int) -> None:
        super().__init__(count)
        self.file, self.times, self.home = file, times, os.getpid()

    def __getitem__(self, index: int) -> Sample:
        died = len(self.file.read_text()) if self.file.exists() else 0
        if index == 20 and os.getpid() != self.home and died < self.times:
            self.file.write_text("x" * (died + 1))
            while not _taken(self.file).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def _taken(file: Path) -> Path:
    return file.with_suffix(".taken")


def taking(steps: Iterable[Any], file: Path) -> Iterator[Any]:
    """The steps; a worker that dies is told when there was one."""
    for step in steps:
        yield step
        _taken(file).touch()


@pytest.mark.slow  # each death is found within five seconds
def test_a_worker_that_dies_loses_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order = EpochOrder(48, None, False, 0)
    right = rows(loader(Captions(48), order=order))
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert rows(taking(loader(Dying(48, once, 1), order=order, num_workers=1), once)) == right
    assert "DataLoader worker" in caplog.text and "step 1 of epoch 0 is loaded again" in caplog.text
    again = loader(Dying(48, twice, 2), order=order, num_workers=1)
    steps = []
    with pytest.raises(InputError, match=r"DataLoader worker.*twice at step 1 of epoch 0.*the step is not lost"):
        for step in taking(again, twice):
            steps.append(step)
    assert rows([*steps, *again]) == right


class Broken(Captions):
    def __getitem__(self, index: int) -> Sample:
        if index == 20:
            raise OSError("image 20 is truncated")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_loaded(workers: int) -> None:
    own = loader(Broken(48), order=EpochOrder(48, None, False, 0), num_workers=workers)
    with pytest.raises(InputError, match=r"OSError while samples .*20.* were loaded for step 1 of epoch 0.*truncated"):
        list(own)
    assert own.state_dict()["step"] == 1


def other(dataset: Captions, **changes: tuple[int, int]) -> dict[str, Any]:
    """The dataset's lengths, with one that is wrong."""
    found = {name: column.copy() for name, column in dataset.lengths.items()}
    for name, (index, value) in changes.items():
        found[name][index] = value
    return found


def padding(samples: list[Sample]) -> Sample:
    """To the longest, and no multiple of anything."""
    return collate(samples, max(len(one["input_ids"]) for one in samples))


def cut(samples: list[Sample], width: int) -> Sample:
    """A collate that pays no attention to the width."""
    return collate(samples, 40)


def test_lengths_that_are_not_those_of_the_samples() -> None:
    dataset = Captions(32)
    tokens, images = int(dataset.tokens[9]), int(dataset.images[9])
    with pytest.raises(InputError, match=rf"sample 9 has {tokens} tokens, and {tokens - 5} by its lengths"):
        list(loader(dataset, other(dataset, tokens=(9, tokens - 5))))
    with pytest.raises(InputError, match=rf"by their images \(sample 9 has {4 * images} rows for {images + 2}\)"):
        list(loader(dataset, other(dataset, images=(9, images + 2))))
    with pytest.raises(InputError, match=r"collate made .* were expected from their lengths.*multiple=1"):
        list(loader(dataset, make=padding))
    with pytest.raises(InputError, match=r"sample \d+ has 40 tokens, and \d+ by its lengths"):
        list(loader(dataset, make=cut))
    with pytest.raises(InputError, match="collate gave a list for samples"):
        list(loader(dataset, make=lambda samples: samples))
    with pytest.raises(InputError, match="no entry of tokens"):
        list(loader(dataset, make=lambda samples: {"pixels": torch.zeros(3)}))


def test_a_sample_that_no_rank_has_room_for() -> None:
    dataset = Captions(48)
    lengths = other(dataset, tokens=(37, 9000))
    with pytest.raises(
        InputError, match=r"sample 37 alone takes .* bytes on rank 1.*room for 1e\+07.*allow .* or more"
    ):
        list(loader(dataset, lengths, room=1e7))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


def test_what_cannot_be_a_loader() -> None:
    with pytest.raises(InputError, match="a Stream cannot be asked for its samples by number"):
        _samples_of(Stream())
    with pytest.raises(InputError, match="the dataset has no samples"):
        _samples_of([])
    with pytest.raises(InputError, match="batch_size is 7, and a step has 8 microbatches"):
        _check_numbers(7, 64, 8, {})
    with pytest.raises(InputError, match=r"batch_size is 2\.5"):
        _check_numbers(2.5, 64, 8, {})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="multiple is 0"):
        _check_numbers(8, 0, 8, {})
    with pytest.raises(InputError, match="collate_fn is given"):
        _check_numbers(8, 64, 8, {"collate_fn": list})
    with pytest.raises(InputError, match=r"the last step of an epoch has 3 of 16 samples, for 8 microbatches"):
        _check_last(35, 16, False, 2, 4)
    _check_last(35, 16, True, 2, 4)
    _check_last(42, 16, False, 2, 4)
    with pytest.raises(InputError, match="an epoch has 10 samples, and a step 16"):
        _check_last(10, 16, True, 2, 4)
    with pytest.raises(InputError, match="a sampler and shuffle=True are given"):
        EpochOrder(8, SequentialSampler(range(8)), True, 0)
    with pytest.raises(InputError, match="a DistributedSampler gives each process samples of its own"):
        EpochOrder(8, DistributedSampler(range(8), num_replicas=2, rank=0), False, 0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the sampler gives 9 at place 1, and the dataset has 8 samples"):
        EpochOrder(8, [3, 9], False, 0).of(0)
    with pytest.raises(InputError, match=r"the sampler gives 1\.5 at place 1, which is no sample's number"):
        EpochOrder(8, [1, 1.5], False, 0).of(0)  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"the sampler gives \[0, 1\] at place 0, which is no sample's number"):
        EpochOrder(8, [[0, 1]], False, 0).of(0)  # type: ignore[list-item]
    once = EpochOrder(8, iter(torch.arange(4)), False, 0)
    assert once.of(0) == [0, 1, 2, 3]
    with pytest.raises(InputError, match="the sampler gives no samples in epoch 1"):
        once.of(1)
    for options in ({"prefetch_factor": 2}, {"persistent_workers": True}, {"batchsize": 3}):
        with pytest.raises(InputError, match=f"DataLoader takes no such options: .*{next(iter(options))}"):
            _check_numbers(8, 64, 8, options)
    _check_numbers(np.int64(8), 64, 8, {"num_workers": 1, "prefetch_factor": 2})  # type: ignore[arg-type]


def test_a_smaller_last_step() -> None:
    dataset = Captions(42)
    steps = list(loader(dataset, drop_last=False))
    assert [sum(len(one["input_ids"]) for one in step) for step in steps] == [16, 16, 10]
