"""Plans on real models: every layout and schedule gives eager's gradients, and the same bits as any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import csc
from csc.errors import CscError, InputError, ScheduleError
from csc.ir.schedule import Message, Schedule, parse, with_messages
from csc.planning.schedules import SCHEDULES
from csc.reports.verification import verify
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer
from csc.simulation.pipeline import from_json
from csc.simulation.simulate import simulate
from tests.compiler import small
from tests.exactness import FLOAT32
from tests.models.hf import valm, valm_batch
from tests.tiers import long

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("traces")]

# Encoders beside each other on ranks 0 and 1, the language model on the others.
PARALLEL = [
    ["vision_tower*", "vision_projector"],
    ["audio_tower*", "audio_projector"],
    ["language_model.model.embed_tokens", "merge", "language_model.model.layers.0"],
    ["language_model.model.layers.1", "language_model.model.layers.2"],
    ["language_model.model.layers.3", "language_model.model.norm", "language_model.lm_head"],
]
# Both encoders on rank 0, one after the other within one stage.
COLOCATED = [[*PARALLEL[0], *PARALLEL[1]], PARALLEL[2] + PARALLEL[3], PARALLEL[4]]


@pytest.fixture(scope="module")
def compiled() -> csc.CompiledModel:
    return csc.compile(valm(), example=valm_batch(8), microbatches=4)


def step(model: csc.CompiledModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model.train_step(model.example)
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


FROZEN = [None, ["vision_tower", "audio_tower"], ["vision_tower", "language_model"]]
LAYOUTS: list[tuple[Any, Any, str, list[int]]] = [  # each with all frozen sets; outside of the long tier with these
    (PARALLEL, None, "1f1b", [1]),
    (PARALLEL, None, "auto", [2]),
    (PARALLEL, [0, 1, 2, 1, 0], "auto", [0]),
    (COLOCATED, None, "zb-h1", [1]),
    (None, None, "auto", [0, 1, 2]),
    (None, None, "zb-v", [0]),
    (None, None, "interleaved-1f1b", [2]),
    (None, None, "interleaved-zb", [1]),
]


@pytest.mark.parametrize(
    ("stages", "placement", "schedule", "freeze"),
    [
        (*layout, freeze) if number in often else long(*layout, freeze)
        for *layout, often in LAYOUTS
        for number, freeze in enumerate(FROZEN)
    ],
)
@pytest.mark.long_cases("stages1-None-1f1b-freeze1")
def test_every_layout_has_the_gradients_of_eager(
    compiled: csc.CompiledModel,
    stages: list[list[str]] | None,
    placement: list[int] | None,
    schedule: str,
    freeze: list[str] | None,
) -> None:
    ranks = max(placement) + 1 if placement else len(stages) if stages else 3
    changed = compiled.with_options(
        mesh={"pp": ranks}, stages=stages, placement=placement, schedule=schedule, freeze=freeze
    )
    result = verify(changed)
    assert result.params_missing == () and result.params_checked > 0
    assert result.loss_rel <= FLOAT32 and result.grad_rel_max <= FLOAT32


def test_stages_on_any_ranks_have_the_gradients_of_eager(compiled: csc.CompiledModel, tmp_path: Path) -> None:
    """As `auto` puts them, not in turns from the first rank on; the program on disk says so, too."""
    changed = compiled.with_options(mesh="pp=2", hardware="a100", freeze=["vision_tower"])
    assert changed.program.schedule is not None
    home = list(changed.program.schedule.placement.values())
    assert len(home) % 2 and home[0] == 1
    result = verify(changed)
    assert result.params_missing == () and result.params_checked > 0
    assert result.loss_rel <= FLOAT32 and result.grad_rel_max <= FLOAT32
    changed.write(tmp_path / "program")
    assert list(parse((tmp_path / "program" / "schedule.txt").read_text()).placement.values()) == home


@pytest.mark.parametrize("freeze", [None, long(["vision_tower"])])
def test_all_schedules_of_the_same_stages_give_the_same_bits(
    compiled: csc.CompiledModel, freeze: list[str] | None
) -> None:
    options = {"mesh": "pp=5", "stages": PARALLEL, "freeze": freeze}
    loss, expected = step(compiled.with_options(schedule="gpipe", **options))
    for name in SCHEDULES.keys() - {"gpipe", "zb-v"}:  # zb-v wants two stages a rank
        found, gradients = step(compiled.with_options(schedule=name, **options))
        assert torch.equal(found, loss) and gradients.keys() == expected.keys(), name
        assert all(torch.equal(gradient, expected[n]) for n, gradient in gradients.items()), name


def apart(schedule: Schedule, channels: Iterable[Message]) -> str:
    """The schedule with every BW as a B and, right behind it, a W."""
    orders = [[part for action in rank if action.computes for part in action.parts] for rank in schedule.ranks]
    return str(with_messages("apart", orders, channels))


@pytest.mark.parametrize(
    ("ranks", "freeze"), [long(2, None), (3, None), long(3, ["embed_tokens"]), (2, ["layers.0", "lm_head"])]
)
@pytest.mark.long_cases("3-None")
def test_a_fused_backward_has_the_bits_of_one_process(tmp_path: Path, ranks: int, freeze: list[str] | None) -> None:
    """Against one rank that runs B of everything, then W of everything."""
    whole = csc.compile(small.text(6), example=small.text_batch(8), microbatches=4, freeze=freeze)
    alone = whole.with_options(mesh="pp=1", schedule="gpipe").program
    assert alone.schedule is not None
    (tmp_path / "apart.txt").write_text(apart(alone.schedule, []))
    loss, expected = step(whole.with_options(mesh="pp=1", schedule=str(tmp_path / "apart.txt")))
    fused = whole.with_options(mesh=f"pp={ranks}", schedule="1f1b")
    assert fused.program.schedule is not None
    kinds = [action.kind for actions in fused.program.schedule.ranks for action in actions]
    assert kinds.count("BW") == 4 * sum(stage.has_w for stage in fused.program.stages) and "W" not in kinds
    found, gradients = step(fused)
    assert torch.equal(found, loss) and gradients.keys() == expected.keys() != set()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())


class Kept(list):
    """What B of a region keeps for W; unlike a tuple it can be counted while it is alive."""

    alive = 0
    most = 0

    def __init__(self, values: Iterable[torch.Tensor]) -> None:
        super().__init__(values)
        Kept.alive += 1
        Kept.most = max(Kept.most, Kept.alive)

    def __del__(self) -> None:
        Kept.alive -= 1


def counting(backward_input: Callable[..., Any], gives: bool) -> Callable[..., Any]:
    """B of a layer file, whose kept values are counted. gives: it returns gradients of activations, too."""

    def counted(*arguments: Any) -> Any:
        found = backward_input(*arguments)
        return (*found[:-1], Kept(found[-1])) if gives else Kept(found)

    return counted


def test_a_fused_backward_keeps_one_region_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six equal layers in a loop, and regions beside them: what W needs of a region is gone before the next one's B."""
    compiled = csc.compile(small.text(6), example=small.text_batch(4), microbatches=2, mesh="pp=1", schedule="1f1b")
    compiled.write(tmp_path / "program", with_weights=True)
    program = load(tmp_path / "program")
    trained = sum(region.needs_dw for region in compiled.program.regions)
    most = {}
    for name, schedule in (("fused", str(program.schedule)), ("apart", apart(program.schedule, []))):
        trainer = Trainer(replace(program, schedule=parse(schedule)))
        layers = trainer.ranks[0].functions[0].forward.__globals__["layers"]
        with monkeypatch.context() as patch:
            for variant in compiled.program.variants.values():
                if variant.backward_weight is not None:
                    file = getattr(layers, variant.name)
                    patch.setattr(file, "backward_input", counting(file.backward_input, any(variant.dx)))
            Kept.alive = Kept.most = 0
            trainer.train_step(compiled.example)
        assert Kept.alive == 0
        most[name] = Kept.most
    assert most == {"fused": 1, "apart": trained} and trained > 6


def test_parallel_encoders_do_not_wait_for_each_other(compiled: csc.CompiledModel) -> None:
    program = compiled.with_options(mesh="pp=5", stages=PARALLEL).program
    pairs = {(m.source, m.destination) for m in program.messages}
    assert not pairs & {(0, 1), (1, 0)} and {(0, 2), (1, 2)} <= pairs
    assert [stage.rank for stage in program.stages] == [0, 1, 2, 3, 4]


def test_a_program_keeps_what_its_plan_expects(compiled: csc.CompiledModel, tmp_path: Path) -> None:
    planned = compiled.with_options(mesh="pp=3", directory=tmp_path / "program")
    planned.write(tmp_path / "program")
    table = json.loads((tmp_path / "program/program.json").read_text())["plan"]
    program = load(tmp_path / "program")
    assert simulate(from_json(table["pipeline"]), program.schedule).makespan == pytest.approx(table["makespan"])
    assert table["makespan"] >= (table["bound"] or table["shared_bound"]) > 0
    assert table["costs"] == "model of cpu"


def test_an_edited_schedule_runs(compiled: csc.CompiledModel, tmp_path: Path) -> None:
    planned = compiled.with_options(mesh="pp=2", schedule="1f1b")
    loss, expected = step(planned)
    stages = [stage.regions for stage in planned.program.stages]
    text = str(planned.program.schedule)
    for mb in (0, 1):  # weight gradients of the last rank go to the end, and out of order
        assert text.count(f"BW 1 {mb} ") == 1
        text = text.replace(f"BW 1 {mb} ", f"B 1 {mb} ")
    assert text.endswith("BW 1 3 | SEND B 1>0 3 | REDUCE\n")
    text = text.replace("SEND B 1>0 3 | REDUCE", "SEND B 1>0 3 | W 1 1 | W 1 0 | REDUCE")
    (tmp_path / "mine.txt").write_text(text)
    found, gradients = step(compiled.with_options(mesh="pp=2", stages=stages, schedule=str(tmp_path / "mine.txt")))
    assert torch.equal(found, loss)
    assert all(torch.equal(gradient, expected[n]) for n, gradient in gradients.items())


Change = Callable[[str], str]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda text: text.replace("BW 1 2 | ", "", 1), ("'B 1 2' is missing", "rank 1")),
        (lambda text: text.replace("BW 1 2 | ", "BW 1 2 | W 1 2 | ", 1), ("'W 1 2' does what 'BW 1 2' does", "rank 1")),
        (lambda text: text.replace("F 0 1 | ", "F 0 1 | F 0 1 | ", 1), ("'F 0 1' stands there twice", "rank 0")),
        (lambda text: text.replace("rank 0: ", "rank 0: RECV B 1>0 3 | ", 1), ("stands there twice", "rank 0")),
        (lambda text: text.replace("F 0 0 | ", "F 0 0 | Q 0 0 | ", 1), ("'Q 0 0' is not an action", "mine.txt")),
        (lambda text: text.split("rank 1:")[0], ("it lists 1 ranks, the mesh has pp=2", "mine.txt")),
    ],
)
def test_schedule_files_that_do_not_fit(
    compiled: csc.CompiledModel, tmp_path: Path, change: Change, parts: tuple[str, str]
) -> None:
    planned = compiled.with_options(mesh="pp=2", schedule="1f1b")
    file = tmp_path / "mine.txt"
    file.write_text(change(str(planned.program.schedule)))
    stages = [stage.regions for stage in planned.program.stages]
    with pytest.raises((ScheduleError, InputError)) as caught:
        _ = compiled.with_options(mesh="pp=2", stages=stages, schedule=str(file)).program
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"memory": "100KB"}, "Allow"),
        ({"memory": "much"}, "write bytes, or a size such as 40GB"),
        ({"hardware": "b1000"}, "there is no hardware profile 'b1000'"),
        ({"schedule": "mine.txt"}, "cannot read it"),
        ({"stages": [["vision_tower*"], ["nothing*"]]}, "no region is called 'nothing*'"),
        ({"stages": [["vision_tower*"], ["*"]]}, "is in stage 0 and in stage 1"),
        ({"stages": [["vision_tower*"], ["audio*"]]}, "is in no stage"),
        ({"stages": [["language_model*", "merge"], ["vision*", "audio*"]]}, "Values go from lower to higher stages"),
        ({"stages": [["*"]]}, ""),
        ({"placement": [0, 0]}, "does not give each of 2 ranks a stage"),
        ({"stages": "vision"}, "pass a list with an entry for each stage"),
        ({"schedule": "zb-v", "chunks": 3}, "zb-v cannot have 3 stages on a rank"),
    ],
    ids=str,
)
def test_plans_that_cannot_be(compiled: csc.CompiledModel, options: dict, part: str) -> None:
    with pytest.raises(CscError) as caught:
        _ = compiled.with_options(mesh="pp=2", **options).program
    assert part in str(caught.value), str(caught.value)


def test_the_memory_limit_is_kept(compiled: csc.CompiledModel) -> None:
    free = compiled.with_options(mesh="pp=3", schedule="auto").program
    assert free.plan is not None
    peak = max(free.plan.peak_memory)
    tight = compiled.with_options(mesh="pp=3", schedule="auto", memory=int(0.8 * peak)).program
    assert tight.plan is not None
    assert max(tight.plan.peak_memory) <= 0.8 * peak
    assert tight.plan.makespan >= free.plan.makespan * (1 - 1e-9)
