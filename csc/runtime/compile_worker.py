"""A process that compiles functions beside one that trains: python -m csc.runtime.compile_worker

It reads a line for each function from its standard input (csc.runtime.compiled_function), before these one with
switches and the path of who started it, and answers each with a line of JSON: {"key": the order's, "error": "" or why
not}. What compilers and layer files print goes to standard error. When its input ends it ends at once, in the middle of
a function too: whoever started it is gone, or wants no more. What is half done was not put into its place. One that is
started before there are functions to make is told their folder, and gets ready for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import TextIO

Lines = queue.SimpleQueue[str]
IDLE = 600.0  # seconds that one which was started ahead waits for what it is to make


def main() -> None:
    """Until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines: Lines = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, lines), daemon=True).start()
    start = json.loads(lines.get())
    sys.path[:] = start["path"]

    from csc.runtime.compiled_function import FunctionOrder, TorchState, prepare

    TorchState(**start["torch"]).set()
    if start["ahead"] is not None:
        with contextlib.suppress(Exception):  # what fails in it fails in an order, which says so
            prepare(Path(start["ahead"]))
    patience = IDLE if start["ahead"] is not None else None
    while True:
        try:
            order = FunctionOrder.read(lines.get(timeout=patience))
        except queue.Empty:  # nobody takes a step of what this was started for
            os._exit(1)
        patience = None
        answer = {"key": order.key, "error": ""}
        try:
            TorchState(**start["torch"]).set()
            order.make()
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


def _listen(stream: TextIO, lines: Lines) -> None:
    for line in stream:
        lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # the compilers that it has started too
    os._exit(1)


if __name__ == "__main__":
    main()
