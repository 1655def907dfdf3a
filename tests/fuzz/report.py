"""What came of the combinations, by kind and by reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def reason(text: str) -> str:
    """A sentence without what differs from model to model: places, names in quotes, numbers."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    line = re.sub(r"\S*\.py:\d+:?", "", line)
    line = re.sub(r"\b(body\.|part\d+\.?|model\.|layers?\.)[\w.]*,?", "", line)
    return re.sub(r"\s+", " ", re.sub(r"\d+", "N", line)).strip(" :,")[:150]


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Counts of outcomes, of reasons, and the files of what failed."""
    kinds = Counter(row["kind"] for row in rows)
    lines = [f"{len(rows)} combinations of {len({row['recipe'] for row in rows})} models", ""]
    lines += [f"{count:6}  {kind}" for kind, count in kinds.most_common()]
    for kind in ("refused", "mixed", "caught", "crash", "hang", "eager"):
        found = Counter(reason(row["reason"]) for row in rows if row["kind"] == kind)
        lines += ["", f"{kind}:"] if found else []
        lines += [f"{count:6}  {text}" for text, count in found.most_common()]
    files = Counter(row["file"] for row in rows if row.get("file"))
    lines += ["", "failures, by the smallest file that shows each:"] if files else []
    return "\n".join([*lines, *(f"{count:6}  {name}" for name, count in files.most_common())])
