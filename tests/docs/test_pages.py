"""The documentation: Python blocks of all pages run, or say why not; links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainingArguments

import csc
from csc.integrations.hf import CompiledTrainer
from tests.docs.pages import DOCS, PAGES, ROOT, anchors, links, script

pytestmark = pytest.mark.usefixtures("traces")

TAUGHT = [page for page in PAGES if page.startswith(("tutorial/", "how-to/", "reference/"))]
RUN = [page for page in PAGES if page in TAUGHT or script(page).code.strip()]
FIRST = "tutorial/first-model.md"  # its files are those that later pages import


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN if page != "reference/command-line.md"])
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages compile the same model, so each but the first starts from its traced graphs, whichever process has them."""
    files = script(FIRST).files | script(page).files
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    path = tmp_path / "page.py"
    path.write_text(script(page).code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("model", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with torch.random.fork_rng():
        if page == FIRST:
            runpy.run_path("train.py", run_name="__main__")
        else:
            assert script(page).code.strip(), f"{page} has no block that runs"
            runpy.run_path(str(path), run_name="__main__")
    for name in ("model", "train"):
        sys.modules.pop(name, None)


def test_pages_have_code_that_runs_but_for_lists_and_design_notes() -> None:
    """And excerpts: of a rank file, of a model whose parts are downloaded."""
    pages = [page for page in PAGES if not page.startswith("decisions/")]
    without = {page for page in pages if not script(page).code.strip() and not script(page).files}
    assert without == {
        "architecture.md", "attention-kernels.md", "fuzzing.md", "installation.md", "measurements.md",
        "planning-bound.md", "known-bugs.md", "published.md", "reference/command-line.md", "troubleshooting.md",
        "search.md", "quantised.md", "rank-file.md", "survive-figures.md",
    }  # fmt: skip


def test_a_block_that_does_not_run_says_why() -> None:
    for page in PAGES:
        text = (DOCS / page).read_text()
        assert text.count("```python") == text.count("<!-- not run: ") + len(script(page).files) + len(
            re.findall(r"(?<!-->\n)```python\n", text)
        ), page


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in links(page):
        path = ROOT / target
        assert path.exists(), f"{page} links to {target}, which is not there"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page} links to {target}#{anchor}, which is no heading"


@pytest.mark.parametrize("page", PAGES)
def test_files_of_the_source_that_are_named_exist(page: str) -> None:
    named = re.findall(
        r"`((?:csc|passes|codegen|kernels|tests|benchmarks|examples)/[\w/]+\.\w+)`", (DOCS / page).read_text()
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": ([\w/-]+\.md)$", settings, re.M)
    apart = re.findall(r"^  /([\w/-]+\.md)$", settings, re.M)  # not_in_nav
    assert len(listed) == len(set(listed)) and set(listed) <= set(PAGES) <= {*listed, *apart}


def test_every_page_is_in_the_list_on_the_first_page() -> None:
    """Decisions have a list of their own."""
    decisions = {f"docs/{page}" for page in PAGES if page.startswith("decisions/")} - {"docs/decisions/index.md"}
    first = {f"docs/{page}" for page in PAGES} - decisions - {"docs/index.md"}
    assert {target for target, _ in links("index.md")} == first
    assert {target for target, _ in links("decisions/index.md")} >= decisions


def test_pages_say_what_they_are_for() -> None:
    """A title, and plain text before the first heading, block, table or picture."""
    for page in PAGES:
        title, _, first = (DOCS / page).read_text().split("\n", 2)
        assert title.startswith("# ") and re.match(r"(?!```)[\w`*]", first), page


def test_names_of_csc_for_those_who_come_from_elsewhere_exist() -> None:
    """The second column of each table: attributes of csc and of a compiled model, and names of arguments."""
    cells = re.findall(r"^\|[^|]+\|([^|]+)\|", (DOCS / "coming-from.md").read_text(), re.M)
    code = " ".join(part for cell in cells for part in re.findall(r"`([^`]+)`", cell))
    for name in re.findall(r"\bcsc\.(\w+)", code):
        assert name in csc.__all__ or importlib.util.find_spec(f"csc.{name}"), name
    for name in re.findall(r"\bcompiled\.(\w+)", code):
        assert hasattr(csc.CompiledModel, name), name
    callables = (
        csc.compile, csc.CompiledModel.train_step, csc.CheckpointManager, CompiledTrainer, Trainer, TrainingArguments,
        DistributedSampler, DataLoader, torch.optim.AdamW,
    )  # fmt: skip
    known = {"level"} | {name for each in callables for name in inspect.signature(each).parameters}  # of logging
    assert set(re.findall(r"\b([a-z]\w*)=", re.sub(r"\"[^\"]*\"", "", code))) <= known


def test_the_site_builds(tmp_path: Path) -> None:
    """As `make docs` does, where the extra `docs` is installed."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    outside = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"?https?://")
    for path in tmp_path.rglob("*.html"):
        assert not outside.search(path.read_text()), path
