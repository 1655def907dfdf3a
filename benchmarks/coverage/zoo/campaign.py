"""Architecture after architecture, each in a process with limits of time and memory; goes on where it stopped.

run(rows_file, names, seconds, gigabytes)      a line of JSON for each architecture
table(rows), summary(rows) -> Markdown
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.coverage.zoo.names import architectures
from benchmarks.coverage.zoo.try_one import WAYS, quiet, row

# what takes long to import, and every architecture would
PRELOADED = ("transformers.models.mixtral.modeling_mixtral", "transformers.models.llava.modeling_llava",
             "transformers.models.whisper.modeling_whisper", "csc.api", "csc.check.first", "csc.check.locate",
             "csc.runtime.trainer", "torch.export._trace", "networkx", "torch._inductor.codecache")  # fmt: skip
WAITING = 10  # times its processor time is what a process may take: others run beside it


def run(rows_file: Path, names: Sequence[str], seconds: float, gigabytes: float) -> None:
    """Try the architectures that have no row yet, mixed, so that the first rows are a sample of all: one class of every
    family before the second of any.
    """
    for module in PRELOADED:
        import_module(module)
    names = mixed(names)
    done = {found["name"] for found in read(rows_file)}
    rows_file.parent.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, start=1):
        if name in done:
            continue
        found = _limited(name, seconds, gigabytes)
        with rows_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{number}/{len(names)} {name}: {cell(found)}", file=sys.stderr, flush=True)


def mixed(names: Sequence[str]) -> list[str]:
    """In an order that says nothing about them, families in turn."""
    known, seen = architectures(), Counter[str]()
    turns = {}
    for name in sorted(names, key=lambda name: sha256(name.encode()).hexdigest()):
        turns[name] = seen[known[name].kind]
        seen[known[name].kind] += 1
    return sorted(turns, key=turns.__getitem__)


def read(rows_file: Path) -> list[dict[str, Any]]:
    """The rows that there are."""
    if not rows_file.exists():
        return []
    return [json.loads(line) for line in rows_file.read_text("utf-8").splitlines()]


def _limited(name: str, seconds: float, gigabytes: float) -> dict[str, Any]:
    """One row, from a fork of this process, which has imported what takes long and run nothing.

    seconds: of its processor; gigabytes: of address space.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(name, seconds, gigabytes, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(WAITING * seconds):
            return ours.recv()
        reason = ["hang", f"no answer in {WAITING * seconds:.0f} s", []]
    except EOFError:
        process.join()
        slow = process.exitcode == -signal.SIGXCPU
        reason = ["hang", f"not done in {seconds:.0f} s", []] if slow else ["crash", "the process died", []]
    finally:
        process.kill()
        process.join()
    return {"name": name, "task": "", "eager": "", "ways": {"pp=2": reason}}


def _serve(name: str, seconds: float, gigabytes: float, pipe: Connection) -> None:
    quiet()
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    pipe.send(row(name))


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
    lines = ["| way | right | refused | crash | hang | wrong | of |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for way in WAYS:
        kinds = Counter(found["ways"][way][0] for found in ran if way in found["ways"])
        counts = [kinds[kind] for kind in ("right", "refused", "crash", "hang", "wrong")]
        lines.append(f"| {way} | {' | '.join(map(str, counts))} | {sum(kinds.values())} |")
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
