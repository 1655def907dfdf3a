"""A sum between ranks that is lost, doubled or taken for another exchange is an error that names the value."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest
from csc.kernels.collectives import ALL_REDUCE, APART, OWN_PART, REDUCE_SCATTER, SHARE
from torch import fx

import csc
from csc.analysis.placements import CheckedGraphs, verify_on, verify_placements
from csc.ir import graph as g
from csc.ir.graph import add_call
from csc.ir.program import Program
from csc.ir.verifier import VerificationError
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.compiler.test_several_divisions import three
from tests.tiers import long

FINISH = APART[ALL_REDUCE][1]
pytestmark = pytest.mark.usefixtures("traces")


def broken(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with one sum of one template changed, in its forward and in its joint graph, and how."""
    for name, template in program.templates.items():
        for which in ("graph", "joint"):
            graph = getattr(template, which)
            for place, node in enumerate(g.calls(graph)):
                for how in HOW.get(node.target, ()):
                    changed = change(graph, place, how)
                    templates = {**program.templates, name: replace(template, **{which: changed})}
                    regions = tuple(replace(region, variant="") for region in program.regions)
                    named = f"{which} of {name}: {node.name} {how}"
                    yield named, replace(program, templates=templates, regions=regions, variants={})


HOW = {ALL_REDUCE: ("lost", "doubled", "swapped"), REDUCE_SCATTER: ("swapped",)}


def change(graph: fx.Graph, place: int, how: str) -> fx.Graph:
    """A copy in which a sum is lost, doubled, or another exchange of the same sizes."""
    copied, _ = g.copy_graph(graph)
    node = g.calls(copied)[place]
    if how == "lost":
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        copied.erase_node(node)
    elif how == "swapped":
        node.target = SHARE if node.target is ALL_REDUCE else OWN_PART
    else:
        users = list(node.users)
        with copied.inserting_after(node):
            again = add_call(copied, ALL_REDUCE, (node, node.args[1]), val=node.meta["val"], like=node)
        for user in users:
            user.replace_input_with(node, again)
    return copied


def flipped(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with one parameter's gradient taken for parts, or for whole, against what the graphs make."""
    used = {name for region in program.regions for name in region.parameters}
    for place, one in enumerate(program.parameters):
        if not one.boxes and one.trainable and one.name in used:
            other = (*program.parameters[:place], replace(one, parts=not one.parts), *program.parameters[place + 1 :])
            yield f"{one.name}, parts {not one.parts}", replace(program, parameters=other)


def flipped_copies(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with one parameter's gradient taken for parts over the ranks that hold the same, or for whole."""
    used = {name for region in program.regions for name in region.parameters}
    for place, one in enumerate(program.parameters):
        size = 2 if not one.copied else 0
        other = (*program.parameters[:place], replace(one, copied=size), *program.parameters[place + 1 :])
        if any(part in one.name for part in ("vision_tower", "one.", "other.")) and one.name in used:
            yield f"{one.name}, copied {size}", replace(program, parameters=other)


FUNCTIONS = ("forward", "backward_input", "backward_weight", "backward")
ENDS = {FINISH: ("lost", "doubled")}


def divided_wrong(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with one sum of F, B, W or BW of one variant changed."""
    for name, variant in program.variants.items():
        for which in FUNCTIONS:
            graph = getattr(variant, which)
            for place, node in enumerate(g.calls(graph) if graph is not None else ()):
                for how in (HOW | ENDS).get(node.target, ()):
                    changed = replace(variant, **{which: change(graph, place, how)})
                    named = f"{which} of {name}: {node.name} {how}"
                    yield named, replace(program, variants={**program.variants, name: changed})


def after(compiled: csc.CompiledModel, name: str) -> Program:
    return next(one for one in compiled.history() if one.history and one.history[-1].name == name)


@pytest.mark.parametrize(("name", "encoder"), [("llava", "vision_tower"), ("patches", "visual")])
@pytest.mark.long_cases("patches-visual")
def test_sums_of_a_component_that_is_shared_out(name: str, encoder: str) -> None:
    """By its samples, or by its tokens. Gradients of its weights are parts, those of what comes behind it are whole,
    and its features are no sum.
    """
    compiled = csc.compile(MODELS[name](), example=BATCHES[name](4), mesh=f"tp=2,{encoder}.tp=1")
    program = after(compiled, "differentiate")
    for which in (broken, flipped):
        verify_placements(program, "differentiate", CheckedGraphs(), {encoder})
        wrong = [(how, one) for how, one in which(program) if "decoder_layer" not in how]  # one key head a rank
        assert len(wrong) >= 4 and not [how for how, one in wrong if not refused(one, {encoder})]


@pytest.mark.long
def test_sums_of_a_component_that_fewer_ranks_divide() -> None:
    """Over the ranks that divide it a sum is lost or doubled as ever; over those that hold the same of it gradients of
    its weights are parts.
    """
    mesh = csc.Mesh.of("tp=4,vision_tower.tp=2")
    compiled = csc.compile(MODELS["llava"](), example=BATCHES["llava"](8), mesh=mesh)
    program = after(compiled, "differentiate")
    verify_on(mesh, program, "differentiate", {})
    for which in (broken, flipped, flipped_copies):
        wrong = [(how, one) for how, one in which(program) if "llama_decoder_layer" not in how]
        missed = []
        for how, one in wrong:
            try:
                verify_on(mesh, one, "here", {})
                missed.append(how)
            except VerificationError:
                pass
        assert len(wrong) >= 4 and not missed, missed


@pytest.mark.parametrize("mesh", ["tp=8,one.tp=2,other.tp=4", "tp=8,one.tp=4,other.tp=2"])
@pytest.mark.long_cases("tp=8,one.tp=2,other.tp=4")
def test_sums_of_components_that_several_numbers_of_ranks_divide(mesh: str) -> None:
    """Each is asked about over its own ranks."""
    program = after(three(mesh), "differentiate")
    verify_on(csc.Mesh.of(mesh), program, "differentiate", {})
    for which in (broken, flipped, flipped_copies):
        wrong = list(which(program))
        for how, one in wrong:
            with pytest.raises(VerificationError, match="invariant 6"):
                verify_on(csc.Mesh.of(mesh), one, "here", {})
                pytest.fail(how)
        assert len(wrong) >= 4


def test_sums_of_functions_are_those_of_their_graph() -> None:
    """Also where they begin before they are waited for."""
    compiled = csc.compile(MODELS["llama"](), example=BATCHES["llama"](4), mesh="tp=2")
    program = compiled.history()[-1]
    verify_placements(program, "schedule", CheckedGraphs())
    wrong = list(divided_wrong(program))
    assert len(wrong) >= 20 and any("backward of" in how and "lost" in how for how, _ in wrong)
    assert not [how for how, one in wrong if not refused(one)]


def refused(program: Program, apart: Collection[str] = ()) -> bool:
    try:
        verify_placements(program, "here", CheckedGraphs(), apart)
    except VerificationError:
        return True
    return False


@pytest.mark.parametrize(
    ("name", "shards", "changes"),
    [("llama", False, 27), ("llama", True, 9), ("mixtral", False, 27), long("gpt2", False, 18), long("lora", True, 9)],
)
@pytest.mark.long_cases("mixtral-False-27", "llama-False-27")
def test_sums_are_there_once(name: str, shards: bool, changes: int) -> None:
    compiled = csc.compile(MODELS[name](), example=BATCHES[name](4), mesh="tp=2", sequence_parallel=shards)
    program = next(one for one in compiled.history() if one.history and one.history[-1].name == "differentiate")
    verify_placements(program, "differentiate", CheckedGraphs())
    found = 0
    for how, wrong in broken(program):
        with pytest.raises(VerificationError, match=r"after pass differentiate: invariant 6: .*(sum|equal|whole)"):
            verify_placements(wrong, "differentiate", CheckedGraphs())
            pytest.fail(how)
        found += 1
    assert found >= changes


def test_sums_of_a_head_whose_words_are_divided() -> None:
    """What a rank's words give to the gradient of the hidden state is a part, which B adds up."""
    compiled = csc.compile(MODELS["llama"](), example=BATCHES["llama"](4), mesh="tp=2", loss_chunk=8)
    *_, program = compiled.history()
    changed = [*broken(after(compiled, "differentiate")), *divided_wrong(program)]
    wrong = [(how, one) for how, one in changed if "head" in how.split(":")[0]]
    assert len(wrong) >= 4 and any("backward_input" in how for how, _ in wrong)
    assert not [how for how, one in wrong if not refused(one)]
