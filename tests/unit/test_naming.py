"""Names from a model become identifiers, and nothing else."""

from __future__ import annotations

import ast
import keyword

import pytest
from csc.codegen.python import comment, quoted
from hypothesis import example, given
from hypothesis import strategies as st
from torch import fx

from csc.ir import graph as g
from csc.ir.graph import RESERVED, identifier, snake, template_name, unique

HOSTILE = st.one_of(
    st.text(),
    st.sampled_from(['a"; import os', '"""', "'", "\\", "\n", "for", "match", "_", "None", "1", "é", "w", ""]),
)


def check(name: str) -> None:
    """A name that may stand in an emitted file."""
    assert name.isidentifier()
    assert name.isascii()
    assert not keyword.iskeyword(name)
    assert not keyword.issoftkeyword(name)
    assert name not in RESERVED
    assert isinstance(ast.parse(name, mode="eval").body, ast.Name)


@given(HOSTILE)
@example("torch")
def test_an_identifier_is_one(text: str) -> None:
    check(identifier(text))


@given(HOSTILE)
def test_an_identifier_stays_as_it_is(text: str) -> None:
    assert identifier(identifier(text)).rstrip("_") == identifier(text).rstrip("_")


@pytest.mark.parametrize("name", ["q_proj", "mlp", "layer_norm1", "lm_head", "A"])
def test_good_names_are_kept(name: str) -> None:
    assert identifier(name) == name


@given(HOSTILE)
def test_an_fx_node_keeps_the_name(text: str) -> None:
    """fx would rename what it does not like, and the emitted file would say another name than the text of the graph."""
    name = identifier(text)
    placeholder = g.add_placeholder(fx.Graph(), name, None, ("activation", "0"))
    call = fx.Graph().create_node("call_function", len, name=name)
    for node in (placeholder, call):
        assert node.name in (name, f"{name}_1")  # the second for a name of Python's builtins
        check(node.name)


@given(st.lists(HOSTILE, max_size=12))
def test_unique_names_are(texts: list[str]) -> None:
    taken: list[str] = []
    for text in texts:
        name = unique(identifier(text), taken)
        assert name.isidentifier()
        taken.append(name)
    assert len(set(taken)) == len(texts)


@given(st.text())
def test_a_string_literal_says_the_text_again(text: str) -> None:
    assert ast.literal_eval(quoted(text)) == text
    assert "\n" not in quoted(text)


@given(HOSTILE)
def test_a_comment_stays_a_comment(text: str) -> None:
    flat = comment(text)
    assert "\n" not in flat
    assert '"' not in flat
    assert "\\" not in flat
    tree = ast.parse(f'"""{flat} """\nx = 1  # {flat}\n')
    assert [type(node) for node in tree.body] == [ast.Expr, ast.Assign]


@pytest.mark.parametrize(
    ("kind", "path", "name"),
    [
        ("LlamaDecoderLayer", "model.layers.3", "llama_decoder_layer"),
        ("CLIPEncoderLayer", "vision.layers.0", "clip_encoder_layer"),
        ("Qwen2_5_VLBlock", "visual.blocks.1", "qwen2_5_vl_block"),
        ("Linear", "lm_head", "lm_head"),
        ("Embedding", "model.embed_tokens", "embed_tokens"),
        ("Linear", "tables", "tables_"),
    ],
)
def test_templates_are_called_as_a_reader_would(kind: str, path: str, name: str) -> None:
    assert template_name(kind, path) == name


@given(HOSTILE)
def test_a_class_name_becomes_an_identifier(text: str) -> None:
    assert snake(text).isidentifier()
