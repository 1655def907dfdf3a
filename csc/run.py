"""`python -m csc.run DIR`: train with a program directory.

Under torchrun each process runs its rank; without it, all ranks run in this process.

    torchrun --nproc-per-node=3 -m csc.run DIR --steps 100 --data data.py:batches --weights llava/ --save out/
    torchrun --nproc-per-node=3 -m csc.run DIR --timeline measured.json               see `csc timeline`
    torchrun --nproc-per-node=8 -m csc.run DIR --emulate 100                          waits instead of computing
    python -m csc.run DIR --steps 3 --json

Exit codes: 0 done; 1 training failed (a loss that is not finite); 2 the program, an option or the data do not
fit; 3 another rank was lost. Whatever goes wrong is said once, in one sentence on stderr, by the rank that
saw it first; --debug adds every rank's traceback.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from csc.errors import CscError, InputError, ProgramError, RankLost

if TYPE_CHECKING:
    from csc.runtime.clocks import ClockSetter
    from csc.runtime.compile_pool import FunctionFolder
    from csc.runtime.meeting import Positions

Batches = Iterator[Any]
FIND_OUT = 2.0  # seconds that a rank has, once the launcher stops it, to find out why
WARM, TIMED = 2, 3  # steps before a timeline is recorded (memory, kernels and imports are new), and steps recorded


class Optimizer(StrEnum):
    """Which torch optimizer makes the step."""

    adamw = "adamw"
    sgd = "sgd"


@dataclass(frozen=True)
class Arguments:
    """The command line, parsed."""

    directory: Path
    steps: int
    batch: Path | None
    data: str | None
    weights: Path | None
    save: Path | None
    lr: float
    optimizer: Optimizer
    clip: float | None
    seed: int
    log_every: int
    json: bool
    timeout: float
    timeline: Path | None = None
    timeline_step: int | None = None
    emulate: float | None = None
    fuse: bool = False
    cuda_graphs: bool = False
    clocks: Path | None = None


def command(
    directory: Annotated[Path, typer.Argument(help="A directory that csc compiled.", show_default=False)],
    steps: Annotated[int, typer.Option(min=0, help="Optimizer steps.")] = 1,
    batch: Annotated[
        Path | None,
        typer.Option(help="safetensors: a global batch, or a microbatch to repeat. Default: DIR/example.safetensors."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="path.py:function; the function yields global batches, the same on every rank."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="safetensors file or HF directory. Default: DIR/weights.safetensors, or random."),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the weights there at the end, as HF does.")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-4,
    optimizer: Annotated[Optimizer, typer.Option(help="Which optimizer.")] = Optimizer.adamw,
    clip: Annotated[float | None, typer.Option(help="Largest 2-norm of all gradients.")] = None,
    seed: Annotated[int, typer.Option(help="For random weights.")] = 0,
    log_every: Annotated[int, typer.Option(min=1, help="Print every this many steps.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds without an answer until a rank counts as lost.")] = 600.0,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help=f"Write when each action ran, for `csc timeline`: the step of median time of the last {TIMED}, after "
            f"{WARM} that warm up. With fewer --steps the others follow the training, which they leave as it is."
        ),
    ] = None,
    timeline_step: Annotated[
        int | None, typer.Option(min=1, help="With --timeline: record this step alone; 1 is the cold first one.")
    ] = None,
    emulate: Annotated[
        float | None,
        typer.Option(min=0.0, help="Do not compute: wait as long as the plan expects, times this factor."),
    ] = None,
    fuse: Annotated[bool, typer.Option(help="Compile the layers' functions with Inductor.")] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="Record what stages launch on a GPU; launch it at once.")] = False,
    clocks: Annotated[
        Path | None,
        typer.Option(help="What `csc energy -o` wrote: set each action's clock, where the driver allows it."),
    ] = None,
    debug: Annotated[bool, typer.Option(help="Tracebacks.")] = False,
) -> None:
    """Train with a compiled program."""
    options = Arguments(
        directory, steps, batch, data, weights, save, lr, optimizer, clip, seed, log_every, as_json, timeout,
        timeline, timeline_step, emulate, fuse, cuda_graphs, clocks,
    )  # fmt: skip
    raise typer.Exit(run(options, debug))


def run(options: Arguments, debug: bool = False) -> int:
    """Train; returns the exit code. Errors become one sentence on stderr."""
    from csc.runtime.launch import open_store, setup_distributed, tell_agent, under_torchrun
    from csc.runtime.loaded_program import load

    store: Any = None
    ending = _Ending()
    try:
        _check_timeline(options)
        if under_torchrun():
            ending.store = store = open_store(options.timeout)
            signal.signal(signal.SIGTERM, ending.stopped)
        own = () if options.emulate is not None else (int(os.environ["RANK"]),) if store else None
        program = load(options.directory, own)
        launch = setup_distributed(program.manifest.device, options.timeout, store) if store else None
        (_train if options.emulate is None else _wait)(options, program, launch, ending)
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        ending.tell(error, debug)
        code = 3 if isinstance(error, RankLost) else 2 if isinstance(error, (InputError, ProgramError)) else 1
        tell_agent(error)
        if store:  # do not let the destructors of a broken process group wait for the others
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code


def _say(sentence: str) -> None:
    print(f"csc.run: {sentence}", file=sys.stderr, flush=True)


class _Ending:
    """How this rank ends if it does not end well: it says so if no other rank has, and one thread of it alone.

    store: of the processes; None: this one is alone. positions: where this rank stands, once it has met the others.
    """

    def __init__(self) -> None:
        self.store: Any = None
        self.positions: Positions | None = None
        self._lock = threading.Lock()

    def tell(self, error: BaseException, debug: bool) -> None:
        """The sentence of an error, or its traceback. Whoever has told ends the process: nobody else of it speaks."""
        self._lock.acquire()
        speaks = self._first()
        if debug or (speaks and not isinstance(error, CscError)):
            traceback.print_exception(error)
        elif speaks:
            _say(str(error))

    def stopped(self, number: int, frame: Any) -> None:
        """torchrun stops the other ranks with SIGTERM as soon as one has died. Two seconds are there to find out why;
        a rank that does not by then says what it knows.
        """
        timer = threading.Timer(FIND_OUT, self._leave)
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        self._lock.acquire()
        if self._first():
            _say(stopped_sentence(int(os.environ["RANK"]), self.positions))
        os._exit(3)

    def _first(self) -> bool:
        from csc.runtime.launch import first_to_speak

        return self.store is None or first_to_speak(self.store)


def stopped_sentence(rank: int, positions: Positions | None) -> str:
    """What a rank knows that the launcher has stopped: the error that it was about to raise, or where it stood and
    which rank it waited for.
    """
    failure = None if positions is None else positions.failure
    if failure is not None:
        return str(failure) if isinstance(failure, CscError) else f"rank {rank}: {type(failure).__name__}: {failure}"
    stood = f"rank {rank}" if positions is None else positions.now.text(rank)
    return f"{stood}: the launcher stopped this rank. Look for a rank that ended before it."


def _train(options: Arguments, program: Any, launch: Any, ending: _Ending) -> None:
    import torch

    from csc.runtime.c10d import Distributed
    from csc.runtime.optimizer import make_optimizer
    from csc.runtime.trainer import Trainer
    from csc.runtime.weights import STD, random_weights

    first = launch is None or launch.rank == 0
    _say_what_is_edited(program, launch)
    transport = Distributed(program, launch.device, options.timeout) if launch else None
    ending.positions = transport.meeting.positions if transport else None
    weights: Any = options.weights
    if weights is None and not (program.directory / "weights.safetensors").is_file():
        mesh = program.manifest.mesh
        held = {mesh.coordinates(launch.rank).pp} if launch else set(range(mesh.pp))
        weights = random_weights([p for p in program.manifest.parameters if held & set(p.ranks)], options.seed)
        if first:
            _say(f"no weights given: random ones, normal with standard deviation {STD}, seed {options.seed}.")
    device = launch.device if launch else None
    trainer = Trainer(
        program, weights, transport, device, fused=options.fuse, artifacts=_artifacts(options),
        graphs=options.cuda_graphs,
    )  # fmt: skip
    setter = _clocks(options, program, trainer.device, launch)
    if setter is not None:
        trainer.ahead = setter.ahead_of
    parameters = list(trainer.parameters())
    make = torch.optim.AdamW if options.optimizer is Optimizer.adamw else torch.optim.SGD
    optimizer = make_optimizer(trainer, make, parameters, lr=options.lr) if parameters else None  # frozen stages
    log = _Log(options, first)
    batches = _batches(options, program)
    last = _last_step(options)
    timed = _timed_steps(options, last)
    traces: list[Any] = []
    batch: Any = None
    with log, nullcontext() if setter is None else closing(setter):
        for number in range(1, options.steps + 1):
            start = time.perf_counter()
            batch = _next(batches, number, options)
            loss = _gradients(trainer, batch, number in timed, traces)
            norm = trainer.clip_grad_norm_(options.clip) if options.clip is not None else None
            if optimizer is not None:
                optimizer.step()
            log.step(number, float(loss), None if norm is None else float(norm), time.perf_counter() - start)
    if setter is not None:
        trainer.ahead = None
        _say(f"rank {launch.rank}: {setter.changes} changes of clock in {options.steps} steps.")
    if options.save is not None:
        trainer.save(options.save)
    if first and last > options.steps:
        _say(f"training is done; {last - options.steps} more steps, which change no weights, for --timeline.")
    for number in range(options.steps + 1, last + 1):
        batch = _next(batches, number, options) if batch is None else batch
        _gradients(trainer, batch, number in timed, traces)
    _record(options, traces, program.manifest, "measured")
    if launch:
        torch.distributed.destroy_process_group()


def _clocks(options: Arguments, program: Any, device: Any, launch: Any) -> ClockSetter | None:
    """What sets this rank's clocks; None where none are asked for, or they cannot be set, which is said. InputError for
    a file that is none, or of another plan.
    """
    if options.clocks is None:
        return None
    from csc.runtime.clocks import clock_setter, read_clocks

    by_position = read_clocks(options.clocks, program.schedule)
    if launch is None:
        _say("--clocks: all ranks share this process and its device. Training goes on at the device's own clocks.")
        return None
    own = by_position[program.manifest.mesh.coordinates(launch.rank).pp]
    setter = clock_setter(own, device, _say)
    if isinstance(setter, str):
        _say(f"--clocks: rank {launch.rank}: {setter}. Training goes on at the device's own clocks.")
        return None
    return setter


def _gradients(trainer: Any, batch: Any, timed: bool, traces: list[Any]) -> Any:
    """Set the gradients of a batch; returns the loss. timed: append when each action ran to `traces`."""
    trainer.trace = timed
    trainer.zero_grad()
    loss = trainer.train_step(batch)
    if timed:
        traces.append(trainer.timeline)
    return loss


def _artifacts(options: Arguments) -> FunctionFolder | None:
    """Where compiled functions are kept: what `csc.compile` has made is found, too."""
    if not options.fuse:
        return None
    from csc.cache.inductor_folder import inductor_folder
    from csc.cache.store import store
    from csc.runtime.compile_pool import FunctionFolder

    return FunctionFolder.of(inductor_folder(store()))


def _check_timeline(options: Arguments) -> None:
    """InputError for a --timeline-step that is none of the training, or that nothing is written of."""
    if options.timeline_step is None:
        return
    if options.timeline is None:
        raise InputError("there is no file for what it records", "--timeline-step", "Give --timeline FILE as well")
    if options.timeline_step > options.steps:
        raise InputError(
            f"there is no step {options.timeline_step}: training has {options.steps}",
            "--timeline-step",
            f"Give --steps {options.timeline_step} or more, or an earlier step",
        )


def _last_step(options: Arguments) -> int:
    """The number of the last step that is run: behind those of the training, if these are too few for a timeline."""
    if options.timeline is None or options.timeline_step is not None:
        return options.steps
    return max(options.steps, WARM + TIMED)


def _timed_steps(options: Arguments, last: int) -> range:
    """The numbers of the steps that are recorded. last: of the last step."""
    if options.timeline is None:
        return range(0)
    if options.timeline_step is not None:
        return range(options.timeline_step, options.timeline_step + 1)
    return range(last - TIMED + 1, last + 1)


def _next(batches: Batches, number: int, options: Arguments) -> Any:
    """The batch of a step. InputError if the data has ended."""
    batch = next(batches, None)
    if batch is None:
        raise InputError(
            f"the data ended after {number - 1} of {options.steps} steps", str(options.data),
            "Give more, or lower --steps",
        )  # fmt: skip
    return batch


def _say_what_is_edited(program: Any, launch: Any) -> None:
    """Each rank says it of the files that it is the first to have; see csc.runtime.loaded_program."""
    from csc.runtime.loaded_program import edited_files

    found = edited_files(program, launch.rank if launch else 0)
    if found:
        _say(f"edited since it was compiled: {', '.join(found)}.")


def _wait(options: Arguments, program: Any, launch: Any, ending: _Ending) -> None:
    """Run emulated ranks (see csc.runtime.emulated) and print each step's seconds beside the simulator's."""
    import torch

    from csc.runtime.c10d import Distributed
    from csc.runtime.emulated import emulated_program, expected, run
    from csc.runtime.timelines import gathered, timeline

    if launch is None:
        raise InputError(
            "emulated ranks need a process each",
            "--emulate",
            f"Start them with torchrun --nproc-per-node={program.manifest.mesh.size} -m csc.run",
        )
    assert options.emulate is not None
    waiting = emulated_program(program)
    transport = Distributed(waiting.program, torch.device("cpu"), options.timeout)
    ending.positions = transport.meeting.positions
    predicted = expected(waiting, options.emulate)
    timed = _timed_steps(options, options.steps)
    recorded: list[Any] = []
    for number in range(1, options.steps + 1):
        (traces,) = run(waiting, transport, 1, options.emulate)
        if number in timed:
            recorded.append(traces)
        measured = timeline(gathered(traces), waiting.program.manifest).makespan
        if launch.rank == 0 and options.json:
            print(json.dumps({"step": number, "seconds": measured, "expected": predicted}), flush=True)
        elif launch.rank == 0:
            print(f"step {number}  emulated {measured:.4f} s  expected {predicted:.4f} s", flush=True)
    _record(options, recorded, waiting.program.manifest, "emulated")
    torch.distributed.destroy_process_group()


def _record(options: Arguments, traces: Sequence[Any], manifest: Any, name: str) -> None:
    """Write a timeline of the steps that were recorded, if any were. All ranks call it."""
    from csc.runtime.timelines import record
    from csc.simulation.page import seconds_text

    if options.timeline is None or not traces:
        return
    makespan = record(options.timeline, traces, manifest, name)
    if 0 in traces[0]:
        which = f"the step of median time of {len(traces)}" if options.timeline_step is None else "step"
        number = "" if options.timeline_step is None else f" {options.timeline_step}"
        _say(f"wrote {options.timeline}: {which}{number}, {seconds_text(makespan)}.")


def _batches(options: Arguments, program: Any) -> Batches:
    if options.data is not None:
        return _from_function(options.data)
    from csc.runtime.batches import from_file

    batch = from_file(program, options.batch)
    return iter(lambda: batch, None)


def _from_function(data: str) -> Batches:
    """Import path.py and call its function. What that raises while it makes a batch goes through as it is."""
    import importlib.util

    path, _, name = data.rpartition(":")
    form = "Write path/to/file.py:function"
    if not path or not name or not Path(path).is_file():
        raise InputError(f"there is no such file: {path or data!r}", "--data", form)
    spec = importlib.util.spec_from_file_location(f"_csc_data_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path!r} is not a Python file", "--data", form)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that its functions can be pickled to the workers of a DataLoader
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"importing {path} raised {type(error).__name__}: {error}", "--data", "Mend it") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise InputError(f"{path} has no function {name!r}; it has {there or 'none'}", "--data", form)
    return iter(function())


class _Log:
    """Losses on rank 0: JSON lines, a progress bar on a terminal, or plain lines."""

    def __init__(self, options: Arguments, first: bool) -> None:
        self.options, self.first = options, first
        self.progress: Any = None
        if first and not options.json and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            text = TextColumn("{task.description}")
            self.progress = Progress(text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.task = self.progress.add_task("step", total=options.steps)

    def __enter__(self) -> None:
        if self.progress:
            self.progress.start()

    def __exit__(self, *error: object) -> None:
        if self.progress:
            self.progress.stop()

    def step(self, number: int, loss: float, norm: float | None, seconds: float) -> None:
        if not self.first:
            return
        if self.progress:
            self.progress.update(self.task, completed=number, description=f"loss {loss:.4f}")
        if number % self.options.log_every and number != self.options.steps:
            return
        if self.options.json:
            print(json.dumps({"step": number, "loss": loss, "grad_norm": norm, "seconds": seconds}), flush=True)
            return
        line = f"step {number}  loss {loss:.6f}" + ("" if norm is None else f"  norm {norm:.4f}") + f"  {seconds:.3f} s"
        if self.progress:
            self.progress.console.print(line, highlight=False)
        else:
            print(line, flush=True)


def main() -> None:
    """Entry point."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app()


def _end_of_rank(code: Any) -> None:
    """End a rank that is done without the interpreter's own end: there, now and then, a thread of gloo that nobody has
    joined aborts the process (exit code -6), and torchrun takes the run for a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ and code in (0, None):
        os._exit(0)
    sys.exit(code)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        _end_of_rank(end.code)
