"""Real processes over gloo; those that run `csc.run` are started by torchrun."""

from __future__ import annotations

import json
import re
from pathlib import Path

import handmade
import pytest
import worker
from safetensors.torch import save_file

from tests.launching import alone, ranks, run_csc, torchrun

pytestmark = pytest.mark.gloo


def test_three_stages(tmp_path: Path) -> None:
    ranks(
        worker.run,
        3,
        "stages",
        handmade.write(tmp_path / "1f1b"),
        handmade.write(tmp_path / "gpipe", schedule="gpipe"),
        handmade.write(tmp_path / "prefix", frozen="prefix"),
        tmp_path / "out",
    )


def test_two_replicas_and_ranks_that_disagree(tmp_path: Path) -> None:
    ranks(worker.run, 2, "replicas", handmade.write(tmp_path / "p", placement=(0, 0, 0), dp=2, microbatches=2))
    one = handmade.write(tmp_path / "one", placement=(0, 0, 0), dp=2)
    handmade.write(tmp_path / "one_3")
    ranks(worker.run, 2, "disagree", one, handmade.write(tmp_path / "two", placement=(0, 0, 0), dp=2, schedule="gpipe"))


@pytest.mark.parametrize("axis", ["dp", "cp", "tp"])
def test_two_ranks_of_one_axis(tmp_path: Path, axis: str) -> None:
    """Values, constants and files that differ are noticed; gradients, losses and the norm are those of one process;
    each parameter is saved once, and loaded on both ranks.
    """
    one, other, edited = (
        handmade.write(tmp_path / name, placement=(0, 0, 0), **{axis: 2}, microbatches=2, frozen="middle")
        for name in ("a", "b", "c")
    )
    save_file({"scale": handmade.scale() + 1}, other / "constants.safetensors")
    (edited / "layers/stage_1.py").write_text((edited / "layers/stage_1.py").read_text() + "# edited on one node\n")
    ranks(worker.run, 2, "axis", one, tmp_path / "out", other, edited)


STOPS = """
def stopping(name, call):
    def wrapped(*arguments):
        if os.environ.get("TEST_STOPS") == name:
            del os.environ["TEST_STOPS"]
            raise KeyboardInterrupt("stopped")
        return call(*arguments)

    return wrapped


import os

for name in ("forward", "backward_input", "backward_weight", "loss_tokens"):
    if name in globals():
        globals()[name] = stopping(name, globals()[name])
"""


def test_a_step_that_fails_on_one_rank_fails_on_all_and_the_next_is_in_order(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p", schedule="zb-h1")
    for rank in range(3):
        file = directory / f"rank_{rank}.py"
        file.write_text(file.read_text() + STOPS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").write_text("no directory")
    ranks(worker.run, 3, "fails", directory, tmp_path / "out")


def test_ranks_that_run_several_stages(tmp_path: Path) -> None:
    ranks(
        worker.run, 2, "replicas", handmade.write(tmp_path / "v", placement=(0, 1, 0), microbatches=4, schedule="auto")
    )


def test_csc_run(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p", placement=(0, 1, 0))
    options = ["--steps", 3, "--lr", 0.1, "--optimizer", "sgd", "--clip", 1.0, "--json"]
    done = torchrun(2, "-m", "csc.run", directory, *options, "--save", tmp_path / "out")
    assert done.returncode == 0, done.stderr[-4000:]
    one = alone(run_csc, str(directory), *map(str, options))
    rows, expected = ([json.loads(line) for line in said.splitlines()] for said in (done.stdout, one))
    assert len(rows) == 3
    for row, other in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"]) and row["grad_norm"] == pytest.approx(other["grad_norm"])
    assert (tmp_path / "out/model.safetensors.index.json").is_file()


def test_a_killed_rank_ends_the_others_with_one_sentence(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p")
    rank = directory / "rank_2.py"
    rank.write_text(
        rank.read_text()
        + "import os, signal\n_forward, _calls = forward, []\n"
        + "def forward(*args):\n    _calls.append(1)\n    if len(_calls) == 10:\n"
        + "        os.kill(os.getpid(), signal.SIGKILL)\n    return _forward(*args)\n"
    )
    done = torchrun(3, "-m", "csc.run", directory, "--steps", 100000)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("csc.run: rank")]
    assert len(said) == 1, done.stderr
    gone = re.search(r"rank ([012]) \(stage \1\) went away while this rank was at '", said[0])
    # on a busy machine a rank may be stopped before it has looked for the other
    stopped = re.match(r"csc\.run: rank [01], .+: the launcher stopped this rank\. Look for a rank that", said[0])
    assert gone or stopped, f"no timeout is waited for: {said[0]}"
    assert done.stderr.count("Traceback") == 1, "only torchrun's own, which it prints when any process fails"


def test_bad_input_is_said_once(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "csc.run", tmp_path / "nowhere")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("csc.run:")]
    assert len(said) == 1 and "there is no such directory" in said[0], done.stderr


@pytest.mark.slow
def test_tied_weights_over_two_positions_of_two_ranks_each(tmp_path: Path) -> None:
    ranks(worker.run, 4, "replicas", handmade.write(tmp_path / "p", placement=(0, 0, 1), tp=2))


@pytest.mark.slow
def test_six_ranks_with_tied_weights_and_replicas(tmp_path: Path) -> None:
    ranks(worker.run, 6, "replicas", handmade.write(tmp_path / "p", dp=2, microbatches=2))


@pytest.mark.long
@pytest.mark.slow
def test_a_silent_rank_counts_as_lost_after_the_timeout(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p")
    rank = directory / "rank_2.py"
    rank.write_text(rank.read_text() + "import time\ndef forward(*args):\n    time.sleep(1000)\n")
    done = torchrun(3, "-m", "csc.run", directory, "--timeout", 3)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("csc.run: rank")]
    # ranks 0 and 1 give up at about the same time: one of them speaks, and names the peer that it waited for
    assert len(said) == 1, done.stderr
    assert ") did not answer in time (or waits itself) while this rank was at 'RECV" in said[0]


@pytest.mark.slow
@pytest.mark.long
def test_ranks_that_torchrun_starts_again_find_no_keys_of_those_before(tmp_path: Path) -> None:
    directory = handmade.write(tmp_path / "p", placement=(0, 1, 0))
    rank = directory / "rank_1.py"
    rank.write_text(
        rank.read_text()
        + "import os, signal\n_forward = forward\ndef forward(*args):\n"
        + "    if os.environ['TORCHELASTIC_RESTART_COUNT'] != '1':\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        + "    return _forward(*args)\n"
    )
    done = torchrun(2, "-m", "csc.run", directory, "--steps", 2, "--json", restarts=1)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [1, 2]
    said = [line for line in done.stderr.splitlines() if line.startswith("csc.run: rank 0")]
    assert len(said) == 1, "once in the attempt that failed"
    assert re.search(r"rank 1 \(stage 1\) went away|^csc\.run: rank 0, .+: the launcher stopped this rank\.", said[0])


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_is_stopped_while_it_computes_says_where_it_stood(tmp_path: Path) -> None:
    """It cannot find out by itself that another rank is gone: it does not wait for it."""
    directory = handmade.write(tmp_path / "p", placement=(0, 1, 0))
    for rank, name, call in ((0, "forward_0", "time.sleep(1000)"), (1, "forward", "os.kill(os.getpid(), 9)")):
        file = directory / f"rank_{rank}.py"
        file.write_text(
            file.read_text()
            + f"import os, time\n_whole, _calls = {name}, []\n"
            + f"def {name}(*args):\n    _calls.append(1)\n    if len(_calls) == {2 - rank}:\n        {call}\n"
            + "    return _whole(*args)\n"
        )
    done = torchrun(2, "-m", "csc.run", directory)
    assert [line for line in done.stderr.splitlines() if line.startswith("csc.run: rank")] == [
        "csc.run: rank 0, at F of stage 0, microbatch 1: the launcher stopped this rank. "
        "Look for a rank that ended before it."
    ], done.stderr
