"""README: short, links that lead somewhere, the lines of an example that runs, commands and make targets that exist."""

from __future__ import annotations

import re
import shlex

import typer.main

from csc.commands.main import app
from tests.docs.pages import ROOT, anchors, links

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n", re.S | re.M)
LINES, PARAGRAPH, READ_ON = 115, 600, 6


def test_it_is_short() -> None:
    """A table row and a list item are paragraphs of their own."""
    assert README.count("\n") <= LINES
    text = re.sub(r"\n(?=- |\|)", "\n\n", BLOCK.sub("", README))
    for paragraph in text.split("\n\n"):
        assert len(paragraph) <= PARAGRAPH, paragraph
    further = README.partition("## Read on\n\n")[2].partition("\n\n")[0]
    assert further.count("](") == READ_ON


def test_links_lead_somewhere() -> None:
    for target, anchor in links("../README.md"):
        assert (ROOT / target).exists(), target
        assert not anchor or anchor in anchors(ROOT / target), f"{target}#{anchor}"


def test_it_says_what_has_not_run_before_it_says_when_to_use_it() -> None:
    assert 0 < README.index("**NCCL and more than one GPU: not yet.**") < README.index("## Use it when")


def test_the_program_is_that_of_an_example() -> None:
    """tests/examples runs it."""
    example = {line.strip() for line in (ROOT / "examples" / "llava.py").read_text().splitlines()}
    (program,) = (code for language, code in BLOCK.findall(README) if language == "python")
    lines = [line.split("  # ")[0].strip() for line in program.splitlines()]
    assert {line for line in lines if line} - example == {"..."}


def test_commands_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    blocks = "".join(code for _, code in BLOCK.findall(README))
    given = re.findall(r"^csc (\w+)(.*?)(?: +#.*)?$", blocks, re.M)
    assert {"explain", "verify", "plan", "simulate", "compile", "timeline"} <= {name for name, _ in given}
    for name, words in given:
        known = {word for parameter in commands[name].params for word in parameter.opts}
        assert {word for word in shlex.split(words) if word.startswith("-")} <= known, f"csc {name}{words}"


def test_each_feature_says_where_it_has_run() -> None:
    table = README.partition("| feature | |\n| --- | --- |\n")[2].partition("\n\n")[0]
    where = [row.rsplit("|", 2)[1].strip() for row in table.splitlines()]
    assert set(where) == {"yes", "CPU", "GPU"}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\w+)", README, re.M))
    assert {"demo", "test"} <= targets and targets <= set(re.findall(r"^(\w+):", makefile, re.M))


def test_extras_are_those_of_the_page_on_installation() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    page = (ROOT / "docs" / "installation.md").read_text()
    table = page.partition("| extra | packages | for |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(re.findall(r"^(\w+) = ", section, re.M))
