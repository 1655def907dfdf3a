"""Checkpoints of a training run in one process: what is damaged, cut off or of something else changes nothing."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import csc
from csc.checkpoints import files, restoring, writing
from csc.checkpoints.files import packed, unpacked
from csc.errors import InputError
from csc.runtime.optimizer import SteppedParameter, check_whole
from csc.runtime.specs import ParameterSpec
from tests import damage
from tests.compiler import small
from tests.launching import PATIENCE
from tests.tiers import long

BATCH = small.text_batch(4)
Make = Callable[..., "Run"]


class Run:
    """A model with dropout, with AdamW and a schedule."""

    def __init__(self, compiled: csc.CompiledModel, directory: Path, schedule: Any = None, **options: Any) -> None:
        self.compiled = compiled
        self.optimizer = compiled.optimizer(torch.optim.AdamW, lr=1e-2)
        make = schedule or (lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]))
        self.scheduler = make(self.optimizer)
        given = {"optimizer": self.optimizer, "scheduler": self.scheduler, **options}
        self.checkpoints = csc.CheckpointManager(directory, compiled, **given)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(float(self.compiled.train_step(BATCH)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses

    def state(self) -> dict[str, Any]:
        """All of it, to be compared."""
        parts = {
            "weights": [p.detach().clone() for p in self.compiled.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)],
        }
        return {name: packed(one, name) for name, one in parts.items()}


@pytest.fixture(scope="module")
def base() -> csc.CompiledModel:
    return csc.compile(small.dropped(), mesh="pp=2", example=BATCH, microbatches=2, check=False, cache=False)


@pytest.fixture
def run(base: csc.CompiledModel, tmp_path: Path) -> Make:
    """The model with its first weights, and new optimizers."""
    first = {name: tensor.clone() for name, tensor in small.dropped().state_dict().items()}

    def make(**options: Any) -> Run:
        freeze = options.pop("freeze", ())
        with torch.no_grad():
            base.model.load_state_dict(first)
        base.zero_grad()
        return Run(base.with_options(freeze=freeze) if freeze else base, tmp_path / "run", **options)

    return make


@pytest.mark.parametrize(
    "schedule",
    [
        lambda one: lr_scheduler.MultiStepLR(one, [2, 4]),
        lambda one: lr_scheduler.OneCycleLR(one, 1e-1, total_steps=9),
        lambda one: lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)),
        lambda one: lr_scheduler.SequentialLR(
            one, [lr_scheduler.ConstantLR(one, 0.1), lr_scheduler.CosineAnnealingLR(one, 5)], [2]
        ),
    ],
)
def test_a_run_goes_on_as_if_nothing_had_been(run: Make, schedule: Any) -> None:
    """Dropout, schedule and generators too, to the bit."""
    whole = run(schedule=schedule)
    assert whole.checkpoints.load() is None and whole.checkpoints.latest is None
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    whole.steps(2)
    whole.checkpoints.save(2, {"epoch": (1, {2: "x"})})
    drawn = random.random(), np.random.rand()
    later, state = whole.steps(3), whole.state()
    again = run(schedule=schedule)
    restored = again.checkpoints.load()
    assert restored is not None and (restored.step, restored.extra) == (2, {"epoch": (1, {2: "x"})})
    assert drawn == (random.random(), np.random.rand())
    assert again.steps(3) == later and again.state() == state


def test_what_is_written_to_later_is_not_in_the_files(run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread begins to write once three more steps were made."""
    trained, write = threading.Event(), files.write

    def late(*arguments: Any) -> Any:
        assert trained.wait(PATIENCE)
        return write(*arguments)

    whole = run(asynchronous=True)
    whole.steps(1)
    torch.manual_seed(9)
    monkeypatch.setattr(files, "write", late)
    saving = whole.checkpoints.save(1)
    assert not saving.done and whole.checkpoints.steps == []
    assert saving.copied == 3 * sum(p.nbytes for p in whole.compiled.model.parameters()) and saving.seconds > 0
    later = whole.steps(3)
    for parameter in whole.compiled.parameters():
        torch.nn.init.zeros_(parameter)
    trained.set()
    assert saving.wait().name == "step-00000001" and saving.done
    again = run()
    again.checkpoints.load()
    assert again.steps(3) == later


def test_a_background_save_that_fails_is_told(
    run: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(asynchronous=True)
    whole.checkpoints.save(1)
    whole.checkpoints.wait()

    def full(*arguments: Any) -> Any:
        raise InputError("it cannot be written (no space left)", "the disk")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "csc"):
        patch.setattr(files, "write", full)
        whole.checkpoints.save(2)
        with pytest.raises(InputError, match="no space left"):
            whole.checkpoints.save(3)
    assert "step-00000002 was not saved: the disk: it cannot be written" in caplog.text
    whole.checkpoints.save(3).wait()
    assert whole.checkpoints.steps == [1, 3]


def test_saves_of_two_managers_at_once(run: Make) -> None:
    """To the same step and to others: none takes the files of another for those of a save that was cut off."""
    whole = run(asynchronous=True, keep=2)
    others = [run(asynchronous=True, keep=2).checkpoints for _ in range(2)]
    for step in range(1, 9):
        saving = [manager.save(step + ahead) for ahead, manager in enumerate([whole.checkpoints, *others])]
        for one in saving:
            one.wait()
    for step in whole.checkpoints.steps:
        assert not list(restoring.damaged(files.read(files.find(whole.checkpoints.directory, step))))
    assert len(whole.checkpoints.steps) == 2 and not files.cut_off(whole.checkpoints.directory)


def test_a_save_that_is_cut_off_anywhere(run: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before each of its files is published, the index too, and each file of older ones that it removes."""
    whole = run(keep=1)
    whole.steps(1)
    whole.checkpoints.save(1)
    state, calls = whole.state(), [0]
    published, unlink = writing.published, Path.unlink

    def stops(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[0] -= 1
            if calls[0] < 0:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        return call

    cut_off = 0
    for number in range(20):
        other = run(keep=1)
        other.checkpoints.load(1)
        assert other.state() == state
        other.steps(1)
        calls[0] = number
        with monkeypatch.context() as patch:
            for module in (writing, files):
                patch.setattr(module, "published", stops(published))
            patch.setattr(Path, "unlink", stops(unlink))
            try:
                other.checkpoints.save(2)
            except KeyboardInterrupt:
                cut_off += 1
        if (tmp_path / "run/step-00000002" / files.FILE).is_file():
            break
        assert other.checkpoints.steps == [1]
    assert cut_off >= 3
    last = run(keep=1)
    assert last.checkpoints.load().step == 2  # type: ignore[union-attr]
    last.checkpoints.save(3)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("mutations", [damage.FAST, long(damage.SLOW)])
def test_damaged_files(run: Make, tmp_path: Path, mutations: int) -> None:
    """An error that names the file, and nothing loaded; or what was saved, if nothing was read of what has changed."""
    whole = run()
    whole.steps(1)
    folder = whole.checkpoints.save(1).folder
    saved = whole.state()
    whole.steps(1)
    before = whole.state()
    draw, refused = random.Random(1), 0
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for _ in range(mutations // 2):
            changed = damage.changed_bytes(draw, content)
            file.write_bytes(changed)
            with torch.random.fork_rng():
                try:
                    whole.checkpoints.load(only=["weights", "optimizer", "scheduler"])
                    assert whole.state() == {**saved, "random": whole.state()["random"]}
                except InputError as error:
                    refused += 1
                    assert file.name in str(error) and whole.state() == before
                    continue
            file.write_bytes(content)
            whole = run()
            whole.checkpoints.load(only=["weights", "optimizer", "scheduler"])
            whole.steps(1)
            before = whole.state()
        file.unlink()
        with pytest.raises(InputError):
            whole.checkpoints.load(1)
        assert whole.state() == before
        file.write_bytes(content)
    assert refused > mutations


def test_a_flipped_byte_names_the_shard_and_the_parameter(run: Make) -> None:
    whole = run()
    whole.steps(1)
    folder = whole.checkpoints.save(1).folder
    part = files.read(folder).parameters["layers.1.qkv.weight"].parts[0]
    content = bytearray((folder / part.file).read_bytes())
    content[part.offset + 5] ^= 1
    (folder / part.file).write_bytes(content)
    before = whole.state()
    with pytest.raises(InputError, match=rf"{part.file}: 'layers\.1\.qkv\.weight': its bytes are not those that were"):
        whole.checkpoints.load()
    (folder / part.file).unlink()
    with pytest.raises(InputError, match=rf"{part.file}: .*there is no such file.*csc checkpoint list"):
        whole.checkpoints.load()
    assert whole.state() == before


def test_another_frozen_set(run: Make, caplog: pytest.LogCaptureFixture) -> None:
    """What was frozen begins without a state, as in a new optimizer; what is frozen now is left as it was."""
    first = run(freeze=["embed", "layers.0"])
    first.steps(2)
    folders = [first.checkpoints.save(step).folder for step in (2, 3)]
    [frozen] = [file.name for file in folders[0].glob("frozen-*")]
    assert (folders[0] / frozen).samefile(folders[1] / frozen), "what does not train is on the disk once"
    state = {n: first.optimizer.state[p] for n, p in first.compiled.named_parameters()}
    embedded = first.compiled.model.embed.weight.detach().clone()
    second = run()
    with caplog.at_level(logging.INFO, "csc"):
        restored = second.checkpoints.load()
    assert restored is not None and restored.begun[0] == "embed.weight" and len(restored.begun) == 9
    assert "the optimizer begins without a state for embed.weight, layers.0" in caplog.text
    for name, parameter in second.compiled.named_parameters():
        found = second.optimizer.state.get(parameter, {})
        assert found.keys() == state.get(name, {}).keys()
        assert all(torch.equal(found[key], state[name][key]) for key in found), name
    assert torch.equal(second.compiled.model.embed.weight, embedded)
    second.steps(1)
    assert not torch.equal(second.compiled.model.embed.weight, embedded)
    second.checkpoints.save(4)
    third = run(freeze=["embed", "layers.0"])
    assert third.checkpoints.load().begun == ()  # type: ignore[union-attr]
    assert third.optimizer.state.keys() == set(third.compiled.parameters())


def test_state_that_is_not_of_entries(run: Make, tmp_path: Path) -> None:
    """Adafactor's rows and columns: for whoever steps whole parameters, in both ways of saving."""
    whole = run()
    factored = whole.compiled.optimizer(torch.optim.Adafactor)
    manager = csc.CheckpointManager(tmp_path / "factored", whole.compiled, optimizer=factored)
    whole.compiled.train_step(BATCH)
    factored.step()
    saved = packed(factored.state_dict(), "")
    manager.save(1)
    whole.compiled.save(tmp_path / "weights", optimizer=factored)
    for load in (manager.load, lambda: whole.compiled.load(tmp_path / "weights", optimizer=factored)):
        factored.step()
        assert packed(factored.state_dict(), "") != saved
        load()
        assert packed(factored.state_dict(), "") == saved
    spec = ParameterSpec("w", (4,), torch.float32, True, (), ())
    shard = SteppedParameter("w", spec, nn.Parameter(torch.ones(2)), (((0, 2),),), True)
    with pytest.raises(InputError, match=r"'row' of 'w' is \[2, 1\], for the whole parameter"):
        check_whole(shard, "row", (2, 1), InputError)


def test_what_it_is_not(run: Make, tmp_path: Path) -> None:
    other = csc.compile(small.text(2), example=BATCH, check=False, cache=False)
    (tmp_path / "file").touch()
    whole = run()
    whole.steps(1)
    whole.checkpoints.save(1)
    before = whole.state()
    checks: list[tuple[str, Callable[[], Any]]] = [
        ("it has no checkpoint of step 7, but of 1", lambda: whole.checkpoints.load(7)),
        ("only has 'loader', and the manager was given none", lambda: whole.checkpoints.load(only=["loader"])),
        ("only has 'wait'", lambda: whole.checkpoints.load(only=["wait"])),
        ("it is no directory", lambda: csc.CheckpointManager(tmp_path / "file", whole.compiled).load()),
        ("step is -1", lambda: whole.checkpoints.save(-1)),
        ("step is True", lambda: whole.checkpoints.save(True)),
        ("keep is 0", lambda: csc.CheckpointManager(tmp_path, whole.compiled, keep=0)),
        ("a list has no state_dict", lambda: csc.CheckpointManager(tmp_path, whole.compiled, scheduler=[])),
        (r"extra\['run'\] is a object, which a checkpoint", lambda: whole.checkpoints.save(2, {"run": object()})),
    ]  # fmt: skip
    for message, call in checks:
        with pytest.raises(InputError, match=message):
            call()
    descent = torch.optim.SGD(whole.compiled.parameters())
    sgd = csc.CheckpointManager(tmp_path / "run", whole.compiled, optimizer=descent)
    with pytest.raises(InputError, match=r"parameter 'embed_tokens\.weight' is not in it.*of a Dropped"):
        csc.CheckpointManager(tmp_path / "run", other).load()
    with pytest.raises(InputError, match="it is the state of AdamW, and this is SGD"):
        sgd.load()
    csc.CheckpointManager(tmp_path / "weights", whole.compiled).save(1)
    with pytest.raises(InputError, match=r"and no optimizer\. load what it has: load\(only=\['weights', 'random', 'ex"):
        csc.CheckpointManager(tmp_path / "weights", whole.compiled, optimizer=whole.optimizer).load()
    whole.compiled.save(tmp_path / "hf")
    with pytest.raises(InputError, match="but weights in another format"):
        csc.CheckpointManager(tmp_path / "hf", whole.compiled).load(1)
    assert whole.state() == before and whole.checkpoints.steps == [1]


class Loader:
    """One that says where it is. anywhere: for all shares alike."""

    def __init__(self, anywhere: bool = False) -> None:
        self.at = 0
        if anywhere:
            self.position_of_all_shares = True

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["at"] > 5:
            raise InputError("it is the position of other data")
        self.at = state["at"]


@pytest.mark.parametrize("anywhere", [False, True])
def test_a_position_of_another_share(run: Make, monkeypatch: pytest.MonkeyPatch, anywhere: bool) -> None:
    loader = Loader(anywhere)
    whole = run(loader=loader)
    loader.at = 3
    whole.checkpoints.save(1)
    loader.at = 0
    whole.checkpoints.load()
    assert loader.at == 3
    loader.at = 4
    monkeypatch.setattr("csc.driver.training_state.place", lambda mesh: (1, 2))
    if anywhere:
        whole.checkpoints.load()
        assert loader.at == 3
    else:
        with pytest.raises(InputError, match="positions of shares 0 of 1, and this process loads share 1 of 2"):
            whole.checkpoints.load()
        assert loader.at == 4


def test_a_loader_that_refuses_its_position_changes_nothing(run: Make) -> None:
    loader = Loader()
    whole = run(loader=loader)
    whole.steps(1)
    loader.at = 9
    whole.checkpoints.save(1)
    whole.steps(1)
    before = whole.state()
    with pytest.raises(InputError, match="it is the position of other data"):
        whole.checkpoints.load()
    assert whole.state() == before


def values() -> Iterator[Any]:
    yield from (None, True, 0, -(2**70), 1.5, float("inf"), "", "ü\ud800", b"\0\xff", [], (), {}, set(), {"csc": 1})
    yield {1: [(2, {None: b"x"})], "s": {(1, 2): 3.25}, "c": {"csc": "tuple", "of": []}}
    yield from (
        torch.arange(6).view(2, 3).t(),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.bool),
    )
    yield from (np.arange(3, dtype=np.uint32), np.zeros((0, 2)), np.float32(0.1), frozenset({1, 2}))


def test_plain_state_comes_back_as_it_was() -> None:
    for value in values():
        found = unpacked(json.loads(json.dumps(packed(value, "it"))))
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype and torch.equal(found, value)
        elif isinstance(value, np.ndarray):
            assert found.dtype == value.dtype and np.array_equal(found, value)
        else:
            assert found == value and (isinstance(value, np.generic) or type(found) is type(value))
    for strange in (object(), lambda: 0, [1, {"x": object}], np.array([object()]), torch.ones(2).to_sparse()):
        with pytest.raises(
            InputError, match=r"^save: it.* is a .*, which a checkpoint does not hold: it has no pickles"
        ):
            packed(strange, "it")
