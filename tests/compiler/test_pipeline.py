"""Passes of users: composed, refused where they stand wrong or do wrong, run, cached, shown."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from csc.passes.pipeline import CLASSES, FACTS, OWN, OWNERS, of_csc, tracing
from csc.passes.runner import after
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import csc
from csc.cache.keys import Opaque, passes_key
from csc.cache.store import Store
from csc.commands.main import main
from csc.driver.compiled import CompiledModel
from csc.driver.options import READERS, changed
from csc.errors import CscError, DifferenceError, InputError
from csc.ir import graph as g
from csc.ir.graph import Writer
from csc.ir.program import Options, Program, Template, Variant
from csc.ir.verifier import VerificationError
from tests import launching
from tests.compiler import small
from tests.compiler.conftest import Models

HERE = "tests.compiler.test_pipeline"
DOES: dict[str, Callable[[Program], Any]] = {}  # by name, what the passes below do


@dataclass(frozen=True)
class MergeEqual(csc.Pass):
    """Compute once what the graph of a layer computes twice."""

    requires: ClassVar = ("differentiated",)
    leave: tuple[str, ...] = ("aten::mm",)

    def __call__(self, program: Program, options: Options) -> Program:
        return replace(program, templates={name: self.merged(one) for name, one in program.templates.items()})

    def merged(self, template: Template) -> Template:
        assert template.joint is not None
        graph, _ = g.copy_graph(template.joint)
        results = graph.output_node().all_input_nodes
        g.merge_equal(graph, {one for one in g.calls(graph) if one not in results and g.op_name(one) not in self.leave})
        return replace(template, joint=graph)


@dataclass(frozen=True)
class HalfAndTwice(csc.Pass):
    """Halve each product and double it again, which keeps every bit: graphs are others, programs train the same."""

    requires: ClassVar = ("differentiated",)
    operator: str = "aten::mm"

    def __call__(self, program: Program, options: Options) -> Program:
        return replace(program, templates={name: self.of(one, program) for name, one in program.templates.items()})

    def of(self, template: Template, program: Program) -> Template:
        assert template.joint is not None
        graph, _ = g.copy_graph(template.joint)
        for node in g.calls(graph):
            if g.op_name(node) == self.operator:
                scaled(node, graph, program, 0.5, 2.0)
        return replace(template, joint=graph)


def scaled(node: fx.Node, graph: fx.Graph, program: Program, *factors: float) -> None:
    """Those who read a call read it times the factors instead."""
    readers, last = list(node.users), node
    for factor in factors:
        with graph.inserting_after(last):
            last = Writer(graph, program.fake_mode).call(node, torch.ops.aten.mul.Tensor, last, factor)
    for reader in readers:
        reader.replace_input_with(node, last)


@dataclass(frozen=True)
class Does(csc.Pass):
    """What the test says."""

    what: str = "nothing"

    def __call__(self, program: Program, options: Options) -> Any:
        return DOES[self.what](program)


@dataclass(frozen=True)
class Options_(csc.Pass):
    """A pass with options of every type that a line holds."""

    name: ClassVar = "with-options"
    flag: bool = False
    count: int = 0
    share: float = 0.5
    word: str = ""
    maybe: int | None = None
    kind: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()
    pairs: tuple[tuple[str, int], ...] = ()

    def __call__(self, program: Program, options: Options) -> Program:
        return program


@dataclass(frozen=True)
class Needs(csc.Pass):
    requires: ClassVar = ("sparse",)

    def __call__(self, program: Program, options: Options) -> Program:
        return program


@dataclass(frozen=True)
class Gives(csc.Pass):
    establishes: ClassVar = ("sparse",)

    def __call__(self, program: Program, options: Options) -> Program:
        return program


@dataclass(frozen=True)
class Lies(csc.Pass):
    """Of the pass that it stands for it does nothing."""

    requires: ClassVar = ("pruned",)
    establishes: ClassVar = ("split", "unordered")

    def __call__(self, program: Program, options: Options) -> Program:
        return program


@dataclass(frozen=True)
class Silent(csc.Pass):
    pass


SOME = (MergeEqual(), Does())
PIPELINE = csc.pipeline().after("simplify", MergeEqual(leave=()))


# --- Lines ------------------------------------------------------------------------------------------------------------

WORDS = st.text(max_size=12)
INTEGERS = st.integers(-(2**63), 2**63)
STEPS = st.one_of(
    st.builds(
        Options_, flag=st.booleans(), count=INTEGERS, share=st.floats(allow_nan=False), word=WORDS,
        maybe=st.none() | INTEGERS, kind=st.sampled_from(["a", "b"]), names=st.lists(WORDS, max_size=3).map(tuple),
        pairs=st.lists(st.tuples(WORDS, INTEGERS), max_size=2).map(tuple),
    ),
    st.builds(MergeEqual, leave=st.lists(WORDS, max_size=3).map(tuple)),
    st.builds(CLASSES["freeze"], freeze=st.none() | st.lists(WORDS, max_size=3).map(tuple)),
    st.builds(CLASSES["partition"], chunks=st.none() | st.integers(1, 9), schedule=WORDS),
    st.sampled_from(OWN),
)  # fmt: skip


@given(st.lists(STEPS, min_size=1, max_size=4))
def test_a_line_reads_back_as_what_it_was(steps: list[csc.Pass]) -> None:
    line = str(type(OWN)(steps))
    assert "\n" not in line
    assert csc.pipeline(line) == tuple(steps)
    assert str(csc.pipeline(line)) == line


def test_csc_pipeline_is_a_line_of_names() -> None:
    assert str(csc.pipeline()) == ",".join(CLASSES)
    chosen = csc.pipeline(freeze=["vision_tower"], precision="bf16", recompute={"a": "full"})
    assert "precision{precision=bf16}," in str(chosen) and "freeze{freeze=[vision_tower]}" in str(chosen)
    assert "recompute{recompute=[[a,full]]}" in str(chosen)
    assert csc.pipeline(str(chosen)) == chosen
    assert csc.pipeline(f" {str(chosen).replace(',', ' , ')} ") == chosen, "white space between words is none's"


BAD_LINES = {
    "": (1, "the line ends where the name of a pass is expected"),
    "shapes,": (8, "the line ends where the name of a pass is expected"),
    "shapes,,split": (8, "',' stands where the name of a pass"),
    "shapes split": (8, "'s' stands where a comma or the end"),
    "shapes,splitt": (8, "there is no pass 'splitt'.*did you mean split"),
    "capture,shapes": (1, "there is no pass 'capture'.*leave it out: the capture is made before"),
    "freeze{freeze=[a,b}": (19, "a list does not end"),
    "freeze{freeze=[a": (17, "a list does not end"),
    "freeze{freeze=[a]": (18, "the options of freeze do not end"),
    "freeze{freeze}": (14, "freeze of freeze has no value.*freeze{freeze=value}"),
    "freeze{freeze=}": (15, "'}' stands where a value is expected"),
    "freeze{frozen=[a]}": (1, "pass freeze has no option 'frozen'.*did you mean freeze"),
    "freeze{freeze=a}": (1, "the option freeze of pass freeze is a.*its type is tuple"),
    "freeze{freeze=[a],freeze=[b]}": (25, "freeze has the option freeze twice"),
    'freeze{freeze=["a]}': (16, "'\"' stands where a value"),
    "shapes{size=1}": (1, "pass shapes has no option 'size'.*it has none"),
    "partition{chunks=many}": (1, "the option chunks of pass partition is many"),
    f"shapes,{HERE}:Missing": (8, "has no 'Missing'"),
    "nowhere.at_all:Pass": (1, "there is no module nowhere.at_all"),
    "nowhere.py:Pass": (1, "there is no file nowhere.py"),
    f"{HERE}:HERE": (1, "is a str, and no pass.*name a class of csc.Pass"),
    f"{HERE}:PIPELINE{{a=1}}": (1, "is made already, and options are given"),
    f"{HERE}:Options_{{count=1.5}}": (1, "the option count of pass with-options is 1.5.*its type is int"),
    f"{HERE}:Options_{{kind=c}}": (1, "the option kind of pass with-options is c"),
    f"{HERE}:Options_{{pairs=[[a]]}}": (1, "the option pairs of pass with-options"),
    f"{HERE}:Options_{{flag=1}}": (1, "the option flag of pass with-options is 1.*its type is bool"),
}  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_cannot_be_read_says_the_column(line: str) -> None:
    column, said = BAD_LINES[line]
    with pytest.raises(InputError, match=rf"(?s){said}") as error:
        csc.pipeline(line)
    assert re.search(rf"passes, column {column}\b", error.value.where), error.value


def test_a_number_is_one_with_a_point_where_that_is_asked_for() -> None:
    (step,) = csc.pipeline(f'{HERE}:Options_{{share=2,names=[true1,"true","1"]}}')
    assert step == Options_(share=2.0, names=("true1", "true", "1")) and type(step.share) is float


def test_a_name_in_a_line_may_stand_for_passes() -> None:
    assert csc.pipeline(f"{HERE}:PIPELINE") == PIPELINE
    assert csc.pipeline(f"shapes,{HERE}:SOME,split") == (OWN[0], *SOME, CLASSES["split"]())


# --- Pipelines --------------------------------------------------------------------------------------------------------


def test_pipelines_are_changed_as_tuples() -> None:
    own, new = csc.pipeline(), Does()
    at = [step.name for step in own].index("split")
    assert own.before("split", new) == (*own[:at], new, *own[at:])
    assert own.after("split", new) == (*own[: at + 1], new, *own[at + 1 :])
    assert own.replaced("split", new) == (*own[:at], new, *own[at + 1 :])
    assert own.after("split", new).without("does") == own
    with pytest.raises(InputError, match=r"has no pass 'splt'.*did you mean split"):
        own.before("splt", new)
    with pytest.raises(InputError, match=r"does stands 2 times.*it is at 0, 1"):
        type(own)((new, new)).without("does")


def test_passes_of_csc_in_their_order_are_no_option() -> None:
    assert changed(Options(), passes=csc.pipeline()) == Options()
    assert changed(Options(), passes=str(csc.pipeline(freeze=["a"]))) == Options(freeze=("a",))
    assert changed(Options(freeze=("a",)), passes=csc.pipeline()).freeze == ("a",), "what a pass does not say stays"


def test_options_of_passes_are_those_of_compile() -> None:
    for name, owner in OWNERS.items():
        assert name in READERS, f"{owner} has an option {name} that csc.compile has not"
        assert getattr(CLASSES[owner](), name) == getattr(Options(), name)


def test_each_fact_of_csc_is_established_by_one_pass() -> None:
    said = [fact for step in OWN for fact in step.establishes]
    assert len(said) == len(set(said)) and {*said, "captured", "unweighed"} == set(FACTS)
    assert {fact for step in OWN for fact in (*step.requires, *step.breaks)} <= set(FACTS)


WRONG = {
    "too early": (lambda p: p.before("differentiate", MergeEqual()), {},
        r"^passes: merge_equal, behind sequence: pass merge_equal requires `differentiated`, which nothing before it "
        r"establishes\. differentiate establishes it: put merge_equal behind differentiate"),
    "too late": (lambda p: p.after("split", MergeEqual()), {},
        r"merge_equal requires `differentiated`, which prune broke.*put merge_equal in front of prune"),
    "at the beginning": (lambda p: (MergeEqual(), *p), {}, r"at the beginning"),
    "a pass that is needed left out": (lambda p: p.without("split"), {},
        r"pass attention_order requires `split`.*put split in front of attention_order"),
    "the last left out": (lambda p: p.without("schedule"), {},
        r"the passes end without `scheduled`.*put schedule at the end"),
    "none": (lambda p: (), {}, r"the passes end without `scheduled`"),
    "two exchanged": (lambda p: (*p[:8], p[9], p[8], *p[10:]), {},
        r"pass tensor requires `regions`.*regions establishes it: put tensor behind regions"),
    "twice": (lambda p: p.after("split", p[18]), {}, r"pass split requires `pruned`, which split broke"),
    "head twice": (lambda p: p.after("head", p[7]), {},
        r"pass head establishes `head`, which head has established already"),
    "a fact of nobody": (lambda p: p.after("split", Needs()), {},
        r"pass needs requires `sparse`, which nothing.*no pass of csc or of the line establishes it"),
    "a fact of a user behind it": (lambda p: p.after("split", Needs(), Gives()), {},
        r"gives establishes it: put needs behind gives"),
    "tp without its pass": (lambda p: p.without("tensor", "sequence"), {"mesh": "tp=2"},
        r"end without `tensor`, which a program for .*tp=2.* needs"),
    "cp without its pass": (lambda p: p.without("context", "data_parallel"), {"mesh": "cp=2"},
        r"end without `context`"),
    "an option without its pass": (lambda p: p.without("precision"), {"precision": "bf16"},
        r"precision is an option of pass precision, which is not among the passes"),
    "an option twice": (lambda p: csc.pipeline(freeze=["a"]), {"freeze": ["b"]},
        r"freeze is given twice: as an option \('b',\), and by pass freeze \('a',\)"),
    "a function": (lambda p: p.after("split", lambda program, options: program), {},
        r"^passes\[19\]: a function is no pass.*__call__ of a frozen dataclass of csc.Pass"),
    "a class": (lambda p: p.after("split", MergeEqual), {}, r"MergeEqual is a class.*MergeEqual\(\)"),
    "a name": (lambda p: (*p, "split"), {}, r"a str \(split\) is no pass"),
    "one pass": (lambda p: MergeEqual(), {}, r"passes is a MergeEqual.*csc.pipeline\(\)"),
    "a number": (lambda p: 3, {}, r"passes is a int"),
    "a pass without a body": (lambda p: p.after("split", Silent()), {}, r"pass silent has no __call__"),
    "an option of the wrong type": (lambda p: p.after("simplify", MergeEqual(leave="aten::mm")), {},
        r"the option leave of pass merge_equal is aten::mm.*tuple"),
    "an option that no line holds": (lambda p: p.after("simplify", MergeEqual(leave=torch.float32)), {},
        r"the option leave of pass merge_equal is a dtype.*a line has to hold it"),
    "an option that csc refuses": (lambda p: csc.pipeline().replaced("loss", CLASSES["loss"]("median")), {},
        r"loss_weight is 'median'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_pipeline_that_cannot_run_is_refused_before_anything_is_traced(case: str) -> None:
    change, options, said = WRONG[case]
    with pytest.raises(InputError, match=f"(?s){said}"):
        changed(Options(), passes=change(csc.pipeline()), **options)


def test_a_pass_of_a_user_may_stand_for_one_of_csc() -> None:
    @dataclass(frozen=True)
    class FreezeBiases(csc.Pass):
        requires: ClassVar = ("differentiated",)
        establishes: ClassVar = ("frozen",)

        def __call__(self, program: Program, options: Options) -> Program:
            flags = (replace(one, trainable=not one.name.endswith("bias")) for one in program.parameters)
            return replace(program, parameters=tuple(flags))

    own = csc.pipeline()
    passes = changed(Options(), passes=own.replaced("freeze", FreezeBiases())).passes
    assert passes is not None and passes[14].name == "freeze_biases"
    options = Options(passes=passes)
    assert [step.name for step in tracing(options)] == list(CLASSES)[:14]
    changed(Options(), passes=own.without("simplify", "views", "head", "attention_order", "overlap", "in_place"))
    changed(Options(), passes=own.after("split", Gives(), Needs()))


# --- Passes that run --------------------------------------------------------------------------------------------------


def ran(models: Models, step: csc.Pass, behind: str = "split", **options: Any) -> CompiledModel:
    return models("text", passes=csc.pipeline().after(behind, step), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "pp=2", "microbatches": 2},
        pytest.param({"mesh": "dp=2,pp=2,cp=2,tp=2", "microbatches": 2}, marks=pytest.mark.long),
        pytest.param({"mesh": "tp=2", "sequence_parallel": True}, marks=pytest.mark.long),
        pytest.param({"mesh": "dp=2", "zero": 3}, marks=pytest.mark.long),
        pytest.param({"fuse": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_pass_of_a_user_trains_what_eager_does(models: Models, options: dict[str, Any]) -> None:
    compiled = ran(models, HalfAndTwice(), "simplify", **options)
    history = compiled.history()
    assert history[-1].history[-1].name == "schedule" and len(history) == 2 + len(OWN)
    before, behind = (after(history, name) for name in ("simplify", "half_and_twice"))
    assert nodes(behind) > nodes(before) > 0
    assert "checked" in compiled.check()


def nodes(program: Program) -> int:
    return sum(len(one.joint.nodes) for one in program.templates.values() if one.joint is not None)


def no_program(program: Program) -> Any:
    return None


def number(program: Program) -> Any:
    return 3


def divides_by_zero(program: Program) -> Any:
    return 1 / 0


def changes_a_graph(program: Program) -> Program:
    variant = next(iter(program.variants.values()))
    call = g.calls(variant.forward)[0]
    call.replace_all_uses_with(call)
    call.args = tuple(reversed(call.args))
    return program


def changes_a_mapping(program: Program) -> Program:
    program.variants.clear()  # type: ignore[attr-defined]
    return program


def says_facts(program: Program) -> Program:
    return replace(program, facts=("scheduled",))


def loses_a_region(program: Program) -> Program:
    return replace(program, regions=program.regions[:-1])


def loses_types(program: Program) -> Program:
    return replace(program, variants={name: _untyped(one) for name, one in program.variants.items()})


def _untyped(variant: Variant) -> Variant:
    graph, _ = g.copy_graph(variant.forward)
    del g.calls(graph)[0].meta["val"]
    return replace(variant, forward=graph)


def nonsense(program: Program) -> Program:
    return replace(program, regions=3)  # type: ignore[arg-type]


DOES |= {
    one.__name__: one
    for one in (
        no_program, number, divides_by_zero, changes_a_graph, changes_a_mapping, says_facts, loses_a_region,
        loses_types, nonsense,
    )
}  # fmt: skip
MISDOES = {
    "no_program": r"^pass does \(.*test_pipeline\.py\): the pass gave nothing, and not a Program",
    "number": r"the pass gave a int, and not a Program",
    "divides_by_zero": r"test_pipeline\.py:\d+: return 1 / 0: pass does raised ZeroDivisionError: division by zero",
    "changes_a_graph": r"the pass changed the graph of .* F of the Program that it was given.*copy it before",
    "changes_a_mapping": r"the pass changed .*of the Program that it was given",
    "says_facts": r"the pass changed the facts or the history",
    "loses_a_region": r"^after pass does: invariant 7: no region makes the loss\. mend the pass",
    "loses_types": r"^after pass does: invariant 1: .* has no type\. mend the pass",
    "nonsense": r"what the pass gave cannot be looked through",
}


@pytest.mark.parametrize("what", MISDOES)
def test_a_pass_that_does_wrong_is_named(models: Models, what: str) -> None:
    with pytest.raises(CscError, match=f"(?s){MISDOES[what]}"):
        ran(models, Does(what)).history()


def test_a_fact_that_does_not_hold_is_an_error(models: Models) -> None:
    compiled = models("text", passes=csc.pipeline().replaced("split", Lies()))
    with pytest.raises(VerificationError, match=r"`split` does not hold .* says that it establishes it"):
        compiled.history()


def test_what_trains_is_not_changed_before_it_is_decided(models: Models) -> None:
    DOES["freeze_all"] = lambda program: replace(
        program, parameters=tuple(replace(one, trainable=False) for one in program.parameters)
    )
    with pytest.raises(InputError, match=r"changed what trains, before that is decided.*behind the pass that freezes"):
        ran(models, Does("freeze_all"), "regions").history()


def doubled_loss(program: Program) -> Program:
    """The gradient of nothing else is right then either."""
    graph, mapping = g.copy_graph(program.graph)
    loss, *rest = g.outputs(program.graph)
    with graph.inserting_before(graph.output_node()):
        twice = Writer(graph, program.fake_mode).call(loss, torch.ops.aten.mul.Tensor, mapping[loss], 2.0)
    graph.output_node().args = ((twice, *(mapping[one] for one in rest)),)
    return replace(program, graph=graph)


def halved_gradients(program: Program) -> Program:
    return replace(program, variants={name: _halved(one, program) for name, one in program.variants.items()})


def _halved(variant: Variant, program: Program) -> Variant:
    if variant.backward_weight is None:
        return variant
    graph, _ = g.copy_graph(variant.backward_weight)
    for node in g.calls(graph):
        if g.op_name(node) == "aten::mm":
            scaled(node, graph, program, 0.5)
    return replace(variant, backward_weight=graph)


def lost_gradient(program: Program) -> Program:
    regions = tuple(replace(one, dw=(False,) * len(one.dw)) for one in program.regions)
    return replace(program, regions=regions)


DOES |= {one.__name__: one for one in (doubled_loss, halved_gradients, lost_gradient)}


@pytest.mark.parametrize(
    ("what", "behind", "kind"),
    [
        ("doubled_loss", "shapes", DifferenceError),
        ("halved_gradients", "split", DifferenceError),
        ("lost_gradient", "prune", VerificationError),
    ],
)
def test_a_pass_that_trains_something_else_is_an_error(
    models: Models, what: str, behind: str, kind: type[CscError]
) -> None:
    compiled = ran(models, Does(what), behind)
    with pytest.raises(kind):
        compiled.check()


def test_a_pass_that_stands_twice_has_two_names(models: Models) -> None:
    DOES["nothing"] = lambda program: program
    history = models("text", passes=csc.pipeline().after("split", Does(), Does())).history()
    names = [program.history[-1].name for program in history]
    assert names[names.index("split") :][1:3] == ["does", "does#2"]
    assert after(history, "does#2") is history[names.index("does#2")]


def test_without_passes_that_only_make_it_faster(models: Models) -> None:
    left_out = ("simplify", "views", "head", "attention_order", "overlap", "in_place", "recompute", "attention")
    compiled = models("text", passes=csc.pipeline().without("context", "data_parallel", *left_out), mesh="pp=2")
    assert "checked" in compiled.check()


@pytest.mark.long
def test_evaluation_runs_passes_of_users_too(models: Models) -> None:
    seen = []
    DOES["seen"] = lambda program: seen.append(any(one.trainable for one in program.parameters)) or program
    compiled = ran(models, Does("seen"))
    compiled.eval_step(small.text_batch(2))
    assert seen and not seen[-1]


def on_two_ranks(what: str) -> None:
    """One rank: train two stages with passes of this file."""
    DOES["nothing"] = lambda program: program
    passes = csc.pipeline().after("simplify", HalfAndTwice()).after("split", Does(what))
    compiled = csc.compile(small.text(2), example=small.text_batch(4), mesh="pp=2", microbatches=2, passes=passes)
    try:
        print(f"loss {float(compiled.train_step(small.text_batch(4))):.6f}")
    except InputError as error:
        print(error)


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "said"), [("nothing", r"loss \d"), ("divides_by_zero", "pass does raised ZeroDivisionError")]
)
def test_ranks_train_or_fail_together(what: str, said: str) -> None:
    heard = [text.splitlines()[-1] for text in launching.ranks(on_two_ranks, 2, what)]
    assert len(set(heard)) == 1 and re.search(said, heard[0]), heard


# --- The cache --------------------------------------------------------------------------------------------------------


def key(*steps: csc.Pass) -> str:
    return passes_key(Options(passes=csc.pipeline().after("simplify", *steps)))


def test_keys_tell_passes_apart() -> None:
    assert key(MergeEqual()) == key(MergeEqual())
    assert len({key(MergeEqual()), key(MergeEqual(leave=())), key(MergeEqual(), MergeEqual()), key(), ""}) == 5
    passes = csc.pipeline().after("split", Gives())
    same = [Options(passes=passes, freeze=frozen) for frozen in (None, ("a",))]
    assert passes_key(same[0]) == passes_key(same[1]), "one trace for both"
    traced = [replace(one, passes=csc.pipeline().before("shapes", Gives())) for one in same]
    assert passes_key(traced[0]) != passes_key(traced[1]), "a pass that traces may look at any option"


def test_a_pass_that_asks_the_world_has_no_key(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Reads(csc.Pass):
        def __call__(self, program: Program, options: Options) -> Program:
            return replace(program, notes=(*program.notes, open(tmp_path / "note").read()))

    with pytest.raises(Opaque):
        key(Reads())


@pytest.mark.long
@pytest.mark.slow
def test_programs_of_passes_are_cached_by_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "csc")

    def entries() -> int:
        return sum(entry.kind == "trace" for entry in Store(tmp_path / "cache").entries())

    def compiled(step: csc.Pass) -> CompiledModel:
        found = csc.compile(small.text(2), example=small.text_batch(2), passes=csc.pipeline().after("simplify", step))
        found.prepare()
        return found

    compiled(MergeEqual())
    assert entries() == 1
    compiled(MergeEqual())
    assert entries() == 1
    compiled(MergeEqual(leave=()))
    assert entries() == 2
    number = {"bound": tmp_path}

    @dataclass(frozen=True)
    class Reads(csc.Pass):
        def __call__(self, program: Program, options: Options) -> Program:
            number["bound"].exists()
            return program

    caplog.clear()
    compiled(Reads())
    assert entries() == 2 and "is not cached" in caplog.text


# --- The command line -------------------------------------------------------------------------------------------------

FILE = '''
from dataclasses import dataclass, replace
from typing import ClassVar
import csc
from tests.compiler import small

@dataclass(frozen=True)
class Note(csc.Pass):
    """Note something."""
    requires: ClassVar = ("split",)
    text: str = "a note"
    def __call__(self, program, options):
        return replace(program, notes=(*program.notes, self.text))

PASSES = csc.pipeline().after("split", Note())
model, batch = small.text(2), small.text_batch(2)
'''


def test_the_command_line_shows_passes_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "noted.py"
    file.write_text(FILE)

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["csc", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        assert not stop.value.code, printed.err
        return printed.out

    listed = json.loads(run("passes", f"{file}:PASSES", "--json"))
    assert listed["line"] == str(csc.pipeline()).replace("split,", f"split,{file}:Note,")
    (note,) = (one for one in listed["passes"] if one["name"] == "note")
    assert note["requires"] == ["split"] and note["options"] == ["text: str"] and note["summary"] == "Note something."
    shared = (f"{file}:model", "--example", "batch", "--passes", listed["line"].replace("Note", "Note{text=mine}"))
    found = json.loads(run("compile", *shared, "-o", str(tmp_path / "program"), "--no-check", "--json"))
    assert "note" in [one["name"] for one in found["passes"]]
    assert not run("diff", *shared[:3], "split", "note", *shared[3:])
    assert run("dump", *shared, "--after", "note") == run("dump", *shared, "--after", "split")


def test_fields_of_csc_are_frozen() -> None:
    assert all(of_csc(step) and not [one for one in fields(step) if one.name == "name"] for step in OWN)
