"""python -m benchmarks.coverage: which models csc compiles, as a table. See docs/models.md.

Exit code 1 if one of the models named is refused or differs from eager PyTorch.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

ROWS = Path("docs/coverage_all.jsonl")


def main() -> None:
    from benchmarks.coverage.check import WAYS, check, fine, of_meshes
    from benchmarks.coverage.models import CASES
    from benchmarks.coverage.more import MORE
    from benchmarks.coverage.report import markdown, show, summary

    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description="Try models of many families.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/models.md")
    parser.add_argument("--model", action="append", choices=CASES | MORE, help="only this model; may be repeated")
    parser.add_argument("--mesh", action="append", help="in this mesh instead (tp=2); may be repeated")
    parser.add_argument("--device", default="cpu", help="where models and batches are: cpu, cuda")
    parser.add_argument(
        "--parity", action="store_true", help="every sharded mesh with every frozen set, and three steps"
    )
    parser.add_argument("--more", action="store_true", help="further models, which no test compiles")
    parser.add_argument("--all", action="store_true", help="all architectures of transformers, made small by rules")
    parser.add_argument("--libraries", action="store_true", help="models of other libraries, which pip brings")
    parser.add_argument("--rows", type=Path, default=ROWS, help="with --all: where rows are kept")
    parser.add_argument("--seconds", type=float, default=60, help="with --all, --libraries: processor time of a model")
    parser.add_argument(
        "--gigabytes", type=float, default=12, help="with --all, --libraries: what its process may hold"
    )
    parser.add_argument("--again", default="", help="with --all: eager,refused,slow,...: try those rows anew")
    parser.add_argument("--show", action="store_true", help="with --all: try nothing, say what the rows say")
    parser.add_argument("--only", default="", help="with --all, --libraries: parts of names, with commas between")
    arguments = parser.parse_args()
    if arguments.all:
        zoo(arguments)
        return
    if arguments.libraries:
        sys.exit(not of_libraries(arguments))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # torch logs what it raises, and here a failure is a row
    chosen = arguments.model or (MORE if arguments.more else CASES)
    if arguments.parity:
        all_cells(chosen, arguments.json)
        return
    rows = []
    ways = of_meshes(arguments.mesh) if arguments.mesh else WAYS
    for number, name in enumerate(chosen, start=1):
        print(f"{name} ({number} of {len(chosen)})", file=sys.stderr, flush=True)
        rows.append(check(name, (CASES | MORE)[name], ways, arguments.device))
    if arguments.json:
        print(json.dumps({"summary": summary(rows), "rows": [row.table() for row in rows]}, indent=1))
    elif arguments.markdown:
        print(markdown(rows))
    else:
        show(rows)
    sys.exit(not all(fine(result) for row in rows for result in row.ways.values()))


def of_libraries(arguments: argparse.Namespace) -> bool:
    """Print what came of models of other libraries. Returns whether each is right, or refused by a sentence."""
    from benchmarks.coverage.libraries import SOUND, compared, kind, markdown, summary

    rows = []
    for row in compared([part for part in arguments.only.split(",") if part], arguments.seconds, arguments.gigabytes):
        rows.append(row)
        print(f"{len(rows)} {row['name']}: {kind(row)}", file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=1) if arguments.json else markdown(rows))
    print(summary(rows), file=sys.stderr)
    return all(kind(row) in SOUND for row in rows)


def all_cells(chosen: Iterable[str], as_json: bool) -> None:
    """Print what came of these models, in every sharded mesh with every frozen set."""
    from benchmarks.coverage.models import CASES
    from benchmarks.coverage.more import MORE
    from benchmarks.coverage.parity import markdown, parity, summary

    found = []
    for name in chosen:
        found.append(parity(name, (CASES | MORE)[name]))
        print(markdown(found[-1:]), file=sys.stderr, flush=True)
    rows = [asdict(one) for one in found]
    print(json.dumps({"summary": summary(found), "rows": rows}, indent=1) if as_json else markdown(found))


def zoo(arguments: argparse.Namespace) -> None:
    """Try what has no row yet, and print what all rows say."""
    from benchmarks.coverage.zoo.campaign import read, run, summary, table
    from benchmarks.coverage.zoo.names import architectures

    parts = [part for part in arguments.only.split(",") if part]
    names = [name for name in architectures() if not parts or any(part in name for part in parts)]
    if not arguments.show:
        again = [kind for kind in arguments.again.split(",") if kind]
        run(arguments.rows, names, arguments.seconds, arguments.gigabytes, again)
    rows = read(arguments.rows)
    print(summary(rows))
    if arguments.markdown:
        print(table(rows))


if __name__ == "__main__":
    main()
