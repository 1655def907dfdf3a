"""The commands of README.md, each on a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shlex
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import csc.commands.target
from csc.commands import main as cli
from csc.commands import printing
from csc.run import main as run_program

pytestmark = pytest.mark.usefixtures("traces")

ROOT = Path(__file__).parents[2]
WIDTH = 80
LARGE = "examples/scale.py"  # models of billions of parameters: benchmarks compile those
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
PARTS = "FBW"  # which tables have as cells


def commands() -> list[list[str]]:
    """Lines of fenced blocks that call csc, or start a program that it wrote, without their comments."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    called = [shlex.split(line, comments=True) for line in lines if line.startswith("csc ") or "-m csc.run" in line]
    return [words for words in called if not any(word.startswith(LARGE) for word in words)]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """sys.stdout is one, of so many columns; what it has got is in the list afterwards, as lines."""
    lines: list[str] = []
    screen, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    received = bytearray()

    def receive() -> None:
        try:
            while part := os.read(screen, 1 << 16):
                received.extend(part)
        except OSError:  # Linux: the other end is closed
            pass

    reader = threading.Thread(target=receive)
    reader.start()
    try:
        with monkeypatch.context() as patch, open(writer, "w", encoding="utf-8") as out:
            patch.setattr(sys, "stdout", out)
            patch.setattr(printing.console, "width", WIDTH)
            yield lines
    finally:
        reader.join()
        os.close(screen)
        lines += CONTROL.sub("", received.decode()).replace("\r\n", "\n").split("\n")


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a command shows; it has to succeed."""
    with terminal(monkeypatch) as lines:
        called(cli.main, words, monkeypatch)
    return lines


def called(main: Callable[[], None], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's entry point, with these words on its command line."""
    code: Any = 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", words)
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    assert code == 0, f"{shlex.join(words)}: exit code {code}"


def letters(line: str) -> set[int]:
    """Where single letters stand alone between edges or wide gaps, as they do in a cell that is one column wide."""
    found = re.finditer(r"(?:^|│ ?|\s\s)([^\W\d_])(?=\s*│|\s\s|\s*$)", line)
    return {each.start(1) for each in found if each[1] not in PARTS}


def test_cells_that_are_one_letter_wide_are_seen() -> None:
    rows = ["│ layers.0 │ f │", "│          │ r │", "│          │ o │"]
    assert set.intersection(*map(letters, rows)) and not letters("│ layers.0 │ F │ frozen │")


@pytest.mark.slow
def test_commands_of_the_readme_fit_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In README's order, since some read what others wrote. Lines that hold a path may be longer, for copying it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(csc.commands.target, "load_file", functools.cache(csc.commands.target.load_file))
    listed = commands()
    assert {"explain", "verify", "plan", "simulate", "mask", "compile", "timeline"} <= {words[1] for words in listed}
    for words in listed:
        if words[0] != "csc":
            called(run_program, words[words.index("csc.run") :], monkeypatch)  # all ranks in this process
            continue
        lines = run(words, monkeypatch)
        assert any(map(str.strip, lines)), shlex.join(words)
        for line in lines:
            assert len(line) <= WIDTH or "/" in line, f"{shlex.join(words)}: {line}"
        for three in zip(lines, lines[1:], lines[2:]):
            assert not set.intersection(*map(letters, three)), f"{shlex.join(words)}: {three}"
