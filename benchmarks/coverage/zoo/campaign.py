"""Architecture after architecture, each in a process with limits of time and memory; goes on where it stopped.

run(rows_file, names, seconds, gigabytes)      a line of JSON for each architecture
table(rows), summary(rows) -> Markdown
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from hashlib import sha256
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.coverage.zoo.names import architectures
from benchmarks.coverage.zoo.try_one import WAYS, quiet, row

# what takes long to import, and every architecture would
PRELOADED = ("transformers.models.mixtral.modeling_mixtral", "transformers.models.llava.modeling_llava",
             "transformers.models.whisper.modeling_whisper", "csc.api", "csc.check.first", "csc.check.first",
             "csc.runtime.trainer", "torch.export._trace", "networkx", "torch._inductor.codecache")  # fmt: skip
WAITING = 20  # times its processor time is what a process may take: others run beside it
KINDS = ("right", "refused", "caught", "crash", "slow", "wrong")  # caught: wrong, and csc's own check said so


def run(rows_file: Path, names: Sequence[str], seconds: float, gigabytes: float, again: Collection[str] = ()) -> None:
    """Try the architectures that have no row yet, or one whose worst result is of a kind in `again`; mixed, so that the
    first rows are a sample of all: one class of every family before the second of any.
    """
    done = {found["name"] for found in read(rows_file) if not kinds(found) & set(again)}
    missing = [name for name in mixed(names) if name not in done]
    rows_file.parent.mkdir(parents=True, exist_ok=True)
    if missing:
        for module in PRELOADED:
            import_module(module)
        gc.collect()
        gc.freeze()  # what is imported is garbage in no process
    for number, name in enumerate(missing, start=1):
        blank: dict[str, Any] = {"name": name, "task": architectures()[name].task, "eager": "", "ways": {}}
        found = limited(blank, partial(row, name), tuple(WAYS), seconds, gigabytes)
        with rows_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{number}/{len(missing)} {name}: {cell(found)}", file=sys.stderr, flush=True)
    gc.unfreeze()
    tidy(rows_file)


def tidy(rows_file: Path) -> None:
    """The newest row of each architecture, by name. Written whole or not at all."""
    lines = [json.dumps(found) + "\n" for found in sorted(read(rows_file), key=lambda found: found["name"])]
    beside = rows_file.with_suffix(".new")
    beside.write_text("".join(lines), encoding="utf-8")
    beside.replace(rows_file)


def kinds(found: dict[str, Any]) -> set[str]:
    """What came of an architecture: "eager" if that does not run, else the kinds of its ways."""
    return {"eager"} if found["eager"] else {result[0] for result in found["ways"].values()}


def mixed(names: Sequence[str]) -> list[str]:
    """In an order that says nothing about them, families in turn."""
    known, seen = architectures(), Counter[str]()
    turns = {}
    for name in sorted(names, key=lambda name: sha256(name.encode()).hexdigest()):
        turns[name] = seen[known[name].kind]
        seen[known[name].kind] += 1
    return sorted(turns, key=turns.__getitem__)


def read(rows_file: Path) -> list[dict[str, Any]]:
    """The newest row of each architecture that has one."""
    if not rows_file.exists():
        return []
    rows = [json.loads(line) for line in rows_file.read_text("utf-8").splitlines()]
    return list({found["name"]: found for found in rows}.values())


def limited(
    found: dict[str, Any],
    rows: Callable[[], Iterator[dict[str, Any]]],
    ways: Sequence[str],
    seconds: float,
    gigabytes: float,
) -> dict[str, Any]:
    """One row, from a fork of this process, which has imported what takes long and run nothing. If the fork dies or is
    stopped, the way that it was at is slow or a crash, and what it had told stays.

    found: the row before anything is known; rows: it as far as it is, again and again; seconds: of the fork's
    processor; gigabytes: of its address space.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(rows, seconds, gigabytes, theirs))
    process.start()
    theirs.close()
    end = time.monotonic() + WAITING * seconds
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            told = ours.recv()
            if told is None:
                return found
            found = told
        result = ["slow", f"no answer in {WAITING * seconds:.0f} s", []]
    except EOFError:
        process.join()
        slow = process.exitcode == -signal.SIGXCPU
        result = ["slow", f"not done in {seconds:.0f} s", []] if slow else ["crash", "the process died", []]
    finally:
        process.kill()
        process.join()
    return found | {"ways": found["ways"] | {next(way for way in ways if way not in found["ways"]): result}}


def _serve(rows: Callable[[], Iterator[dict[str, Any]]], seconds: float, gigabytes: float, pipe: Connection) -> None:
    quiet()
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for found in rows():
        pipe.send(found)
    pipe.send(None)


def cell(found: dict[str, Any]) -> str:
    """A row in a line."""
    if found["eager"]:
        return "eager does not run: " + found["eager"][:100]
    return ", ".join(f"{way} {result[0]}" for way, result in found["ways"].items())


def reason(text: str) -> str:
    """A sentence without what differs from model to model."""
    text = re.sub(r"^(\S+, )?\S+\.py:\d+: ", "", text.strip().splitlines()[0] if text.strip() else "")
    text = re.sub(r"\S*(model|encoder|decoder|layers)\.[\w.]+,?", "...", text)
    return re.sub(r"\d+", "N", text)[:160]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many are right, refused, crashed, wrong, and what refused them, as Markdown."""
    ran = [found for found in rows if not found["eager"]]
    lines = [f"| way | {' | '.join(KINDS)} | of |", f"|{' --- |' * (2 + len(KINDS))}"]
    for way in WAYS:
        counted = Counter(found["ways"][way][0] for found in ran if way in found["ways"])
        counts = [counted[kind] for kind in KINDS]
        lines.append(f"| {way} | {' | '.join(map(str, counts))} | {counted.total()} |")
    lines += ["", f"{len(rows)} architectures, of {len(ran)} the eager step runs.", ""]
    for way in WAYS:
        found = Counter(
            (result[0], reason(result[1])) for r in ran if (result := r["ways"].get(way)) and result[0] != "right"
        )
        lines += [f"{way}:", ""] + [f"- {count} {kind}: {text}" for (kind, text), count in found.most_common()] + [""]
    return "\n".join(lines)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each architecture whose eager step runs."""
    lines = [f"| architecture | {' | '.join(WAYS)} |", f"|{' --- |' * (1 + len(WAYS))}"]
    for found in sorted(rows, key=lambda found: found["name"]):
        if not found["eager"]:
            cells = [found["ways"].get(way, ["-"])[0] for way in WAYS]
            lines.append(f"| {found['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)
