"""Searches that really train: what a trial is, what is done once, what a kill leaves, what bad input gets."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import csc
from csc.composition import ComposedModel
from csc.errors import InputError
from csc.model_search.candidates import Candidates, Parts, SearchedPair, narrowed, trial_model, widened
from csc.model_search.encoder_features import RememberedEncoder
from csc.model_search.ledger import sole
from csc.model_search.pair_plans import power_of
from csc.model_search.result import Counts, PairRow, SearchResult, pareto
from csc.model_search.searching import stepping
from csc.model_search.trials import _file_name, _number
from csc.reports.search_page import HEADINGS, cells, page
from tests.launching import PATIENCE, ROOT
from tests.model_search import sign_pairs as pairs


@pytest.mark.parametrize("projector", ["mlp", "linear"])
def test_a_trial_model_trains_what_the_pair_would(tmp_path: Path, projector: str) -> None:
    """Loss and gradients of the composed model with its encoder, though features have zeros beside and behind them."""
    candidates = Candidates(pairs.encoders(), pairs.decoders(), Parts(projector, pairs.IMAGE), tmp_path)
    for name in pairs.SIDES:
        candidate = candidates.candidate((name, "small"))
        given = pairs.batch(candidate, range(6))
        model = trial_model(candidate, "vision", candidates.spec, 24)
        own = candidate.model.get_submodule("vision_projector")
        model.projector.load_state_dict(widened(own.state_dict(), 24))
        entries = candidates.entries(candidate, given, tokens=8, width=24)
        assert entries["features"].shape == (6, 8, 24)
        loss = model(**entries).loss
        loss.backward()
        expected = candidates.composed((name, "small"), candidate.model.language_model)
        expected.get_submodule("vision_projector").load_state_dict(own.state_dict())
        reference = {key: one.grad.clone() for key, one in model.language_model.named_parameters()}
        model.language_model.zero_grad()
        whole = expected(**given).loss
        whole.backward()
        torch.testing.assert_close(loss, whole)
        for key, parameter in expected.language_model.named_parameters():
            torch.testing.assert_close(reference[key], parameter.grad)
        grads = {key: one.grad for key, one in model.projector.named_parameters()}
        for key, one in narrowed(grads, pairs.SIDES[name][0]).items():
            torch.testing.assert_close(one, expected.get_submodule("vision_projector").get_parameter(key).grad)
        first = "weight" if projector == "linear" else "linear_1.weight"
        assert not grads[first][:, pairs.SIDES[name][0] :].any()
        model.zero_grad()
        expected.zero_grad()


def test_an_encoder_runs_once_on_each_item(tmp_path: Path) -> None:
    encoder = pairs.encoder("narrow")
    items = torch.randn(10, 3, 4, 8)
    runs: list[int] = []
    encoder.register_forward_hook(lambda _, given, __: runs.append(len(given[0])))
    remembered = RememberedEncoder(encoder, None, tmp_path)
    first = remembered(items[:6]).last_hidden_state
    again = remembered(items[[5, 2, 7, 7, 9]]).last_hidden_state
    other = RememberedEncoder(encoder, None, tmp_path)  # another process, or a later run
    assert torch.equal(other(items[:6]).last_hidden_state, first)
    assert runs == [6, 2] and remembered.passes == other.passes == 1.0
    assert torch.equal(again[0], first[5]) and torch.equal(again[2], again[3])
    torch.testing.assert_close(first, encoder.eval()(items[:6]).last_hidden_state)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A search in one process, its directory and its arguments."""
    directory = tmp_path_factory.mktemp("search")
    given = pairs.arguments()
    before = {name: {k: v.clone() for k, v in llm.state_dict().items()} for name, llm in given["llms"].items()}
    result = csc.search(**given, directory=directory)
    for name, llm in given["llms"].items():  # the user's own modules are as they were
        assert all(torch.equal(value, before[name][key]) for key, value in llm.state_dict().items())
    return result, directory, given


def test_a_search_does_each_thing_once(found: Any) -> None:
    result, _, _ = found
    assert result.counts.samples <= result.budget < result.counts.grid
    assert result.counts.captures == 2  # of six pairs
    assert result.counts.encoder_passes == dict.fromkeys(pairs.SIDES, 1.0)
    assert result.counts.samples == sum(row.samples for row in result.rows)
    assert len(result.rows) == 6 and result.best.samples == result.full == 96
    assert all(row.dropped for row in result.rows[1:]) and not result.best.dropped
    assert result.best.pair in result.front
    json.dumps(result.as_dict())


def test_the_winner_is_a_composed_model_that_scores_as_it_did(found: Any, tmp_path: Path) -> None:
    result, _, _ = found
    model = result.winner()
    assert isinstance(model, ComposedModel) and type(model.vision_encoder).__name__ == "ViTModel"

    class Candidate:
        pass

    candidate = Candidate()
    candidate.model = model.eval()  # type: ignore[attr-defined]
    with torch.no_grad():
        assert float(pairs.score(candidate).mean()) == pytest.approx(result.best.score, abs=1e-5)
    model.save_pretrained(tmp_path)
    again = ComposedModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match="was not trained"):
        result.model("narrow", "other")


@pytest.mark.long
def test_what_is_planned_is_what_the_whole_pair_would_be_planned_as(found: Any) -> None:
    """From captures of the encoder and of the language model, against a capture of the composed model."""
    _, directory, given = found
    result = csc.search(**given, directory=directory, mesh="pp=2", microbatches=2)
    assert all(row.planned_seconds and row.planned_bytes for row in result.rows)
    assert all(row.planned_joules is None and row.joules is None for row in result.rows)
    priced = csc.search(**given, directory=directory, mesh="pp=2,dp=2", microbatches=2, hardware="a100")
    for row in priced.rows:  # four devices draw 83.64 W while they wait, and at most 500 W
        assert 4 * 83 * row.planned_seconds < row.planned_joules < 4 * 500 * row.planned_seconds
        assert row.joules == row.planned_joules * row.samples / 16
    assert result.counts.captures <= 3 + 2 + 2  # of six pairs; where no cache is on, language models in both runs
    row = next(row for row in result.rows if row.pair == ("wide", "large"))
    composed = csc.compose(
        encoders={"vision": pairs.encoder("wide")}, projectors={"vision": "mlp"}, language_model=pairs.decoder(24),
        placeholders={"vision": pairs.IMAGE},
    )  # fmt: skip

    class Candidate:
        model = composed

    compiled = csc.compile(
        composed, mesh="pp=2", microbatches=2, freeze=["vision_encoder"], example=pairs.batch(Candidate, range(8)),
        check=False,
    )  # fmt: skip
    plan = compiled.program.plan
    assert row.planned_seconds == pytest.approx(plan.makespan, rel=0.15)
    assert row.planned_bytes == pytest.approx(max(plan.peak_memory), rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize("freeze", [None, []])
def test_pairs_that_share_a_program_learn_what_they_would_alone(tmp_path: Path, freeze: list[str] | None) -> None:
    """Every parameter against a plain loop, of pairs whose parts are equal but for their weights: one capture serves
    them all. Without a freeze the encoder trains, too.
    """

    def other(part: torch.nn.Module) -> Any:
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.mul_(0.7)
        return part

    def parts() -> tuple[dict[str, Any], dict[str, Any]]:
        encoders = {"narrow": pairs.encoder("narrow"), "faint": other(pairs.encoder("narrow"))}
        small = pairs.decoder(16)
        return encoders, {"small": small, "again": small, "weak": other(pairs.decoder(16))}

    encoders, llms = parts()
    given = pairs.arguments(encoders=encoders, llms=llms, freeze=freeze, budget=None, strategy="grid", samples=24)
    result = csc.search(**given, directory=tmp_path)
    assert result.counts.captures == 1
    untouched = parts()
    for part, name in ((part, name) for part, named in enumerate((encoders, llms)) for name in named):
        for key, value in untouched[part][name].state_dict().items():
            assert torch.equal((encoders, llms)[part][name].state_dict()[key], value)
    order = np.random.default_rng([0, 0]).permutation(len(pairs.DATA)).tolist()
    for row in result.rows:
        encoders, llms = parts()
        torch.manual_seed(_number(0, *row.pair))
        model = csc.compose(
            encoders={"vision": encoders[row.encoder]}, projectors={"vision": "mlp"}, language_model=llms[row.llm],
            placeholders={"vision": pairs.IMAGE},
        )  # fmt: skip
        if freeze is None:
            encoders[row.encoder].requires_grad_(False).eval()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        for step in range(3):
            model(**pairs.batch(SearchedPair(*row.pair, model), order[8 * step : 8 * step + 8])).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found = result.model(*row.pair)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(found.get_parameter(key), parameter, rtol=1e-4, atol=2e-6)
        moved = {
            key.split(".")[0]
            for key, parameter in found.named_parameters()
            if not torch.equal(parameter, _given(parts(), row, key))
        }
        assert ("vision_encoder" in moved) == (freeze is not None) and "language_model" in moved


def _given(parts: Any, row: PairRow, key: str) -> torch.Tensor:
    """A parameter of a pair's part as it was given; of the projector, which is new, none."""
    component, _, name = key.partition(".")
    module = {"vision_encoder": parts[0][row.encoder], "language_model": parts[1][row.llm]}.get(component)
    return torch.empty(0) if module is None else module.get_parameter(name)


def test_a_search_that_is_there_trains_nothing_again(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result, directory, given = found
    before = (directory / "ledger.jsonl").read_bytes()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it trains, captures or scores again")

    monkeypatch.setattr("csc.model_search.trials.PairTrials._trained", refuse)
    monkeypatch.setattr("csc.model_search.trials.PairTrials._scored", refuse)
    again = csc.search(**given, directory=directory)
    assert again.rows == result.rows and (directory / "ledger.jsonl").read_bytes() == before
    with pytest.raises(InputError, match="it is of a search with seed 0, and this one has 1"):
        csc.search(**given, directory=directory, seed=1)
    with pytest.raises(InputError, match=r"budget|strategy"):  # its rungs have other samples than checkpoints
        csc.search(**{**given, "strategy": "grid", "budget": None}, directory=directory)
    for changed in (
        {"optimizer": partial(torch.optim.AdamW, lr=2e-4)}, {"optimizer": partial(torch.optim.SGD, lr=1e-4)},
        {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2)}, {"clip": None}, {"probe": 32},
        {"options": {**given["options"], "precision": "bf16"}},
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"it is of a search with {next(iter(changed))} .*, and this one has"):
            csc.search(**{**given, **changed}, directory=directory)
    for name in ("batch", "score"):
        with pytest.raises(InputError, match=f"it is of a search with code of {name} .*, and this one has"):
            csc.search(**{**given, name: partial(given[name])}, directory=directory)
    other = {name: copy.deepcopy(llm) for name, llm in given["llms"].items()}
    next(iter(other.values())).get_input_embeddings().weight.data.mul_(1.01)
    with pytest.raises(InputError, match="weights of language model"):
        csc.search(**{**given, "llms": other}, directory=directory)


def test_a_second_search_does_not_begin_beside_the_first(found: Any) -> None:
    _, directory, given = found
    with sole(directory), pytest.raises(InputError, match="another search runs in it"):
        csc.search(**given, directory=directory)
    assert csc.search(**given, directory=directory).rows  # the first one is over


def test_a_directory_that_cannot_be_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="it cannot be used"):
        csc.search(**pairs.arguments(), directory=tmp_path / "file" / "search")


def test_schedules_are_told_apart_by_their_rates() -> None:
    adamw = partial(torch.optim.AdamW, lr=1e-3)

    def schedule(last: float) -> Any:
        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: last if step > 5 else 1.0)

    assert stepping(adamw, schedule(0.5), 8) == stepping(adamw, schedule(0.5), 8) != stepping(adamw, schedule(0.4), 8)
    assert stepping(lambda parameters: adamw(parameters), None, 8) == stepping(adamw, None, 8)
    picky = stepping(lambda parameters: adamw(list(parameters)[3]), None, 8)
    assert " at 0x" not in picky["optimizer"]


def test_pairs_have_checkpoints_of_their_own_whatever_their_names() -> None:
    names = ["a", "b", "a--b", "b--c", "c", "a+b", "b+c", "a/b", "..", "a-", "-b", "%2B"]
    assert len({_file_name((e, m)) for e in names for m in names}) == len(names) ** 2


KILLED = """
import os, signal, sys
from tests.model_search import sign_pairs as pairs
import csc
from csc.model_search.trials import PairTrials
left = int(sys.argv[2])
step = PairTrials._step
def counted(*arguments):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments)
PairTrials._step = counted
csc.search(**pairs.arguments(), directory=sys.argv[1])
"""


@pytest.mark.long
@pytest.mark.parametrize("after", [3, 8, 15])
def test_a_search_that_is_killed_goes_on_to_the_same_end(found: Any, tmp_path: Path, after: int) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(after)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    result, _, given = found
    again = csc.search(**{**given, "encoders": pairs.encoders(), "llms": pairs.decoders()}, directory=tmp_path)
    assert [(row.pair, row.curve, row.score) for row in again.rows] == [
        (row.pair, row.curve, row.score) for row in result.rows
    ]
    assert again.counts.encoder_passes == dict.fromkeys(pairs.SIDES, 1.0)


TEAMS = """
import sys
from tests.model_search import sign_pairs as pairs
import csc
result = csc.search(**pairs.arguments(), directory=sys.argv[1], trial_mesh=sys.argv[2])
assert result.winner() is not None
"""


@pytest.mark.long
@pytest.mark.gloo
@pytest.mark.parametrize("ranks, mesh", [(2, "pp=1"), (2, "dp=2"), (4, "dp=2")])
def test_teams_of_processes_find_what_one_process_finds(found: Any, tmp_path: Path, ranks: int, mesh: str) -> None:
    """PairTrials beside each other, and data parallel within a trial."""
    from tests.launching import torchrun

    script = tmp_path / "teams.py"
    script.write_text(TEAMS)
    done = torchrun(ranks, script, tmp_path / "run", mesh)
    assert done.returncode == 0, done.stderr[-3000:]
    result, _, given = found
    again = csc.search(**given, directory=tmp_path / "run", trial_mesh=mesh)
    assert again.counts.samples == result.counts.samples
    assert [row.pair for row in again.rows] == [row.pair for row in result.rows]
    for row, expected in zip(again.rows, result.rows, strict=True):
        assert row.score == pytest.approx(expected.score, abs=1e-3)
    assert again.counts.encoder_passes == dict.fromkeys(pairs.SIDES, 1.0)


# --- what bad input gets ----------------------------------------------------------------------------------------------


def test_a_pair_that_cannot_be_composed_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    given = pairs.arguments(encoders={"narrow": pairs.encoder("narrow"), "none": torch.nn.Linear(2, 2)}, budget=None)
    result = csc.search(**given, directory=tmp_path, samples=16, strategy="grid")
    assert {row.pair for row in result.rows[:2]} == {("narrow", "small"), ("narrow", "large")}
    for row in result.rows[2:]:
        assert row.encoder == "none" and "it cannot be composed: " in row.dropped and "Linear" in row.dropped
        assert row.score is None and not row.samples


@pytest.mark.long
def test_an_encoder_that_runs_on_nothing_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    """It composes, and its first batch raises: in trials, and where steps are planned."""
    broken = pairs.encoder("narrow")
    broken.register_forward_pre_hook(lambda *_: 1 / 0)
    encoders = {"broken": broken, "narrow": pairs.encoder("narrow")}
    given = pairs.arguments(encoders=encoders, llms={"small": pairs.decoder(16)}, budget=None, strategy="grid")
    told: list[str] = []
    result = csc.search(**given, directory=tmp_path, samples=8, mesh="pp=2", tell=told.append)
    assert any("no step is planned for broken x small: " in line and "ZeroDivisionError" in line for line in told)
    assert result.best.planned_seconds and result.rows[1].planned_seconds is None
    assert result.best.encoder == "narrow" and result.rows[1].dropped == "ZeroDivisionError: division by zero"


def test_scores_that_are_no_numbers_or_raise_fail_their_pair_alone(tmp_path: Path) -> None:
    def score(candidate: Any) -> Any:
        if candidate.encoder == "narrow":
            return float("nan")
        if candidate.encoder == "wide":
            raise ZeroDivisionError("no sample was right")
        return 0.5

    given = pairs.arguments(score=score, llms={"small": pairs.decoder(16)}, budget=None)
    result = csc.search(**given, directory=tmp_path, samples=16, strategy="grid")
    why = {row.encoder: row.dropped for row in result.rows}
    assert result.best.encoder == "fine" and result.best.score == 0.5 and result.best.spread is None
    assert "score() gave nan" in why["narrow"]
    assert why["wide"] == "ZeroDivisionError: no sample was right"
    assert (tmp_path / "trials" / "narrow+small" / "step-00000002").is_dir()  # what was trained is there

    def broken(candidate: Any) -> Any:
        raise RuntimeError("broken")

    with pytest.raises(InputError, match=r"every pair failed; .*broken"):
        csc.search(**{**given, "score": broken}, directory=tmp_path / "other", samples=16, strategy="grid")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data": [1, 2]}, "a batch has 8 samples, and a training to the end has 2"),
        ({"samples": 4}, "a batch has 8 samples, and a training to the end has 4"),
        ({"budget": 90}, "the budget is 90 samples, and .* takes "),
        ({"budget": -1}, "budget is -1"),
        ({"strategy": "mordal", "probe": 4}, "clusters are told by 4 samples, and need 8"),
        ({"strategy": "best"}, "there is no strategy 'best'"),
        ({"freeze": ["vision_encoder", "vision_projector", "language_model"]}, "nothing trains"),
        ({"freeze": ["vision_encoder", "llm"]}, "freeze names 'llm'"),
        ({"seed": -1}, "seed is -1"),
        ({"perfect": float("nan")}, "perfect is nan"),
        ({"encoders": {}}, "encoders is {}"),
        ({"projector": torch.nn.Linear(2, 2)}, "projector is a module"),
        ({"mesh": "pp2"}, "'pp2' is not NAME=SIZE"),
        ({"placeholders": {"small": pairs.IMAGE, "large": 99}}, None),
        ({"placeholders": 99}, "none of 6 pairs can be searched; narrow x small: it cannot be composed: .*99"),
        ({"encoders": {"wide": pairs.encoder("wide")}, "llms": {"small": pairs.decoder(16)}}, "one pair alone"),
    ],
)
def test_what_cannot_be_searched_is_a_sentence(tmp_path: Path, change: dict[str, Any], message: str | None) -> None:
    if message is None:
        candidates = Candidates(pairs.encoders(), pairs.decoders(), Parts("mlp", change["placeholders"]), tmp_path)
        assert {pair[1] for pair in candidates.impossible} == {"large"}
        return
    with pytest.raises(InputError, match=message):
        csc.search(**pairs.arguments(**change), directory=tmp_path)
    assert not (tmp_path / "trials").exists()


def test_power_is_that_of_profiles_that_measured_it() -> None:
    power = power_of({"mesh": "pp=2,dp=2", "hardware": "a100"})
    assert power is not None and power.devices == (2, 2) and power.clocks[0].waiting == 83.64
    assert power_of({"mesh": "pp=2", "hardware": "h100"}) is None
    assert power_of({"mesh": "pp=2"}) is None


def test_the_front_is_what_nothing_beats() -> None:
    def row(name: str, score: float | None, seconds: float | None, size: float | None) -> PairRow:
        return PairRow(name, "m", score, None, 8, 1.0, (), "", seconds, size)

    rows = [row("best", 0.9, 3, 9), row("fast", 0.5, 1, 9), row("beaten", 0.5, 2, 9), row("small", 0.4, 2, 1)]
    assert pareto(rows) == {("best", "m"), ("fast", "m"), ("small", "m")}
    assert ("unfit", "m") not in pareto([*rows, row("unfit", 0.99, None, None)])
    assert pareto([row("a", 0.1, None, None), row("b", 0.2, None, None), row("c", None, None, None)]) == {("b", "m")}


@pytest.mark.parametrize("joules", [None, 1234.5])
def test_energy_is_shown_where_it_is_known(joules: float | None) -> None:
    row = PairRow(
        "e", "m", 0.9, None, 24, 1.0, ((24, 0.9),), "", 1.0, 2e9, joules, None if joules is None else 3 * joules
    )
    counts = Counts(24, 48, 2, {"e": 1.0}, 1.0, 1.0, 1.0)
    result = SearchResult((row,), "halving", 24, 24, "pp=2", 1.0, counts, lambda _: None)  # type: ignore[arg-type, return-value]
    assert len(cells(row, result)) == len(HEADINGS) - 1
    assert ("3.70 kJ" in page(result, "pairs")) == ("1.23 kJ" in page(result, "pairs")) == (joules is not None)
    assert result.as_dict()["rows"][0]["planned_joules"] == joules
