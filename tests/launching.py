"""Real processes for tests: under torchrun, or forked from one process that has imported everything already.

Terms
  forkserver   a process that imports csc, transformers and peft once and then forks: importing them again
               for every rank of every test took most of the time of the tests with processes

    torchrun(processes, *command) -> CompletedProcess          as users start them: python -m torch.distributed.run
    ranks(main, processes, *arguments) -> [str]                main(*arguments) on so many ranks; what each wrote
    script(processes, path, *arguments) -> [str]               the same of a file of Python
    alone(main, *arguments, **environment) -> str              main in one process of its own
    run_file(path, *arguments)                                 for these: a file of Python, as `python path ...` runs it
    run_csc(*arguments)                                        for these: `python -m csc.run ...`, which has to succeed
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch.distributed as dist

from csc import cores

ROOT = Path(__file__).parents[1]
PATIENCE = 600.0  # seconds: for what hangs. What is only slow, beside other work, is done by then
IMPORTED = [
    "csc",
    "csc.driver.compiler",
    "csc.integrations.hf",
    "csc.runtime.trainer",
    "peft",
    "tests.compiler.gloo_models",
]


def torchrun(
    processes: int, *command: object, timeout: float = PATIENCE, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """The command under torchrun, from the root of the repository, with one thread a process. restarts: how often
    torchrun starts all anew when one ends.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launcher.append(f"--max-restarts={restarts}")
    environment = {**cores.environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*launcher, *map(str, command)], capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT
    )


def script(processes: int, path: str, *arguments: str) -> list[str]:
    """The file, from the root of the repository, on so many ranks that have imported most of what it does already."""
    return ranks(run_file, processes, path, *arguments)


def run_file(path: str, *arguments: str) -> None:
    """The file as a script, from the root of the repository; it changes the process."""
    os.chdir(ROOT)
    sys.argv, sys.path = [path, *arguments], [str(Path(path).parent), *sys.path]
    runpy.run_path(path, run_name="__main__")


def run_csc(*arguments: str) -> None:
    sys.argv = ["csc.run", *arguments]
    try:
        runpy.run_module("csc.run", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, f"exit code {end.code}"


def ranks(main: Callable[..., None], processes: int, *arguments: Any, dying: int = 0, again: bool = False) -> list[str]:
    """main(*arguments) on so many processes with the environment that torchrun would give them, and torchrun's kind of
    store, which outlives any rank; what each of them wrote. AssertionError with what the first rank that failed wrote,
    if one did. dying: how many may be killed: the others are waited for. again: those are started once more.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    places = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        for rank in range(processes)
    ]
    return _heard(main, [place | meeting for place in places], arguments, dying, again)


def alone(main: Callable[..., None], *arguments: Any, **environment: str) -> str:
    """main(*arguments) in one process of its own, with these variables beside those of this one; what it wrote.
    AssertionError with that, if it failed.
    """
    return _heard(main, [environment], arguments)[0]


def _heard(
    main: Callable[..., None], environments: Sequence[Mapping[str, object]], arguments: tuple[Any, ...], dying: int = 0,
    again: bool = False,
) -> list[str]:  # fmt: skip
    """What main(*arguments) wrote in a process for each of these environments. dying: how many may be killed; again:
    and are started once more.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder:

        def start(rank: int) -> Any:
            environment = {**os.environ, **{name: str(value) for name, value in environments[rank].items()}}
            heard = Path(folder, f"{rank}.txt")
            process = context.Process(target=_rank, args=(main, environment, heard, arguments), daemon=True)
            process.start()
            return process

        started = [start(rank) for rank in range(len(environments))]
        failed = _first_failure(started, dying, start if again else None)
        assert failed is None, (
            f"rank {failed} ended with {started[failed].exitcode}:\n"
            + Path(folder, f"{failed}.txt").read_text()[-4000:]
        )
        return [Path(folder, f"{rank}.txt").read_text() for rank in range(len(environments))]


def _first_failure(started: list[Any], dying: int, start: Callable[[int], Any] | None = None) -> int | None:
    """Wait until all processes are done, or one has failed: the others wait for it in vain, and are ended. dying: how
    many may be killed before; start: makes another one in its place.
    """
    end, running = monotonic() + PATIENCE, dict(enumerate(started))
    failed = None
    while running and failed is None:
        if not wait([process.sentinel for process in running.values()], end - monotonic()):
            failed = min(running)
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                if process.exitcode == -signal.SIGKILL and dying:
                    dying -= 1
                    if start is not None:
                        started[rank] = running[rank] = start(rank)
                    continue
                failed = rank if process.exitcode and failed is None else failed
    for process in running.values():
        process.kill()
        process.join()
    return failed


def _rank(main: Callable[..., None], environment: Mapping[str, str], heard: Path, arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with heard.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        main(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
