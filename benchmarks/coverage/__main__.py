"""python -m benchmarks.coverage: which models csc compiles, as a table. See docs/coverage.md."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings


def main() -> None:
    from benchmarks.coverage.check import check
    from benchmarks.coverage.models import CASES
    from benchmarks.coverage.report import markdown, show, summary

    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description="Try models of many families.")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/coverage.md")
    parser.add_argument("--model", action="append", choices=CASES, help="only this model; may be repeated")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # torch logs what it raises, and here a failure is a row
    rows = []
    for number, name in enumerate(arguments.model or CASES, start=1):
        print(f"{name} ({number} of {len(arguments.model or CASES)})", file=sys.stderr, flush=True)
        rows.append(check(name, CASES[name]))
    if arguments.json:
        print(json.dumps({"summary": summary(rows), "rows": [row.table() for row in rows]}, indent=1))
    elif arguments.markdown:
        print(markdown(rows))
    else:
        show(rows)


if __name__ == "__main__":
    main()
