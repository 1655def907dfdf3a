"""features.py: what the step takes of a frozen encoder, made by no step.

features_source(index, features) -> text        forward(batch, received, weights, constants) -> features, None
"""

from __future__ import annotations

from dataclasses import replace

from csc.codegen.index import BESIDE, ProgramNames
from csc.codegen.python import comment
from csc.codegen.rank_file import imports
from csc.codegen.stage_functions import StageWriter

from csc.ir.program import Features


def features_source(index: ProgramNames, features: Features) -> str:
    """The text of the file."""
    writer = StageWriter(index, replace(features.stage, index=BESIDE), set(), "")
    values = ", ".join(f"{comment(value)} {index.types[value]}" for value in features.values)
    regions = f"{comment(features.regions[0].name)} ... {comment(features.regions[-1].name)}"
    opening = [
        '"""What the frozen encoder makes of a batch: no step runs it, and its results are kept on disk.',
        "",
        f"Holds     {regions} ({len(features.regions)} regions): frozen",
        f"Makes     {values}",
        '"""',
    ]
    return "\n".join([*opening, "", ""]) + "\n\n".join([imports([writer]), writer.forward()])
