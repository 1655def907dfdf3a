"""How the ranks of a program are started, and what is said when the wrong number of them was.

Terms: torchrun's *agent* starts the processes of one node. It reads the reason of a failure from a file that it names
in each process' environment (TORCHELASTIC_ERROR_FILE) and prints it last, under "Root Cause".

    command(ranks, per_node, script) -> "torchrun --nproc-per-node 3 train.py"
    check_world(world, ranks, mesh)               InputError, on one rank: the others wait for the agent to stop them
    tell_agent(error)                             writes the file
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from csc.errors import InputError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PATIENCE = 10.0  # seconds; an agent stops the processes of its node within one, those of other nodes within a few


def command(ranks: int, per_node: int, script: str) -> str:
    """What starts `ranks` processes, at most `per_node` on a node: for several nodes with `on each of N nodes: `."""
    here = max(n for n in range(1, min(ranks, per_node) + 1) if ranks % n == 0)
    if here == ranks:
        return f"torchrun --nproc-per-node {ranks} {script}"
    nodes = ranks // here
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"on each of {nodes} nodes: torchrun --nnodes {nodes} --nproc-per-node {here} {meeting} {script}"


def check_world(world: int, ranks: int, mesh: str) -> None:
    """InputError if so many processes are not the ranks of the mesh. The first process raises it; the others leave the
    word to it for a while, in which the agent that sees it fail stops them.
    """
    if world == ranks:
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    started = f" ({world // here} nodes x {here})" if here < world else ""
    error = InputError(
        f"{world} processes were started{started} and the mesh has {ranks} ranks ({mesh})", "mesh",
        f"start {ranks}: the number of nodes times --nproc-per-node; or change the mesh",
    )  # fmt: skip
    if os.environ.get("RANK", "0") != "0":
        time.sleep(PATIENCE)
    tell_agent(error)
    raise error


def tell_agent(error: Exception) -> None:
    """Leave the sentence where torchrun's agent looks for the reason of a failure. Nothing without such a place."""
    place = os.environ.get(ERROR_FILE)
    if not place:
        return
    with contextlib.suppress(OSError):  # the sentence stands on stderr as well
        Path(place).write_text(json.dumps({"message": str(error), "timestamp": str(int(time.time()))}))
