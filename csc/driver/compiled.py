"""A compiled model: the programs for its batches, the training loop's half of csc, and what commands and reports read
of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from csc import devices
from csc.check.eager import EagerStep
from csc.check.first import step_of
from csc.codegen.write import checked_ranks
from csc.driver import training_state
from csc.driver.batches import fullest, place
from csc.driver.compiler import Compiler, Progress
from csc.driver.model_programs import Example, GivenBatches, ModelPrograms
from csc.driver.options import changed, closed
from csc.driver.programs import ProgramSet
from csc.driver.steps import Steps
from csc.driver.training_state import Saved
from csc.errors import InputError
from csc.ir.program import Options, Program
from csc.passes.pipeline import Pipeline, pipeline_of
from csc.passes.recompute import AUTO, saves_of
from csc.planning.problem import Problem
from csc.runtime.launch import several_processes
from csc.runtime.loss import StepLoss
from csc.runtime.meeting import without_dead
from csc.runtime.optimizer import make_optimizer
from csc.runtime.survival import Survive
from csc.runtime.trainer import Trainer
from csc.simulation.timeline import Timeline

# --- What users of an nn.Module look for on a compiled model, and what there is instead: sentences -------------------


WHOLE = "`compiled.gather()` gives the eager model with what all ranks have trained: "
INSTEAD = {
    "generate": f"{WHOLE}compiled.gather().generate(...)",
    "forward": f"compiled.train_step(batch) runs forward and backward; {WHOLE}compiled.gather()(**batch)",
    "to": "put the model on its device, in its dtype, before csc.compile; precision='bf16' computes in bfloat16",
    "modules": f"{WHOLE}its modules are those of compiled.model",
    "named_modules": f"{WHOLE}its modules are those of compiled.model",
    "requires_grad_": "freeze=[...] says what is frozen: compiled.with_options(freeze=[...]) compiles without a trace",
    "save_pretrained": f"compiled.save(directory) writes the weights; {WHOLE}compiled.gather().save_pretrained(...)",
    "compile": "it is compiled already; compiled.with_options(...) changes how",
    "load_state_dict": "compiled.load(directory) reads what compiled.save or save_pretrained wrote; a dict of tensors "
    "goes to compiled.model.load_state_dict(...), on every rank",
    "backward": "compiled.train_step(batch) runs forward and backward",
    "step": "compiled.train_step(batch) makes the gradients, the optimizer steps",
    "no_sync": "compiled.train_step(batch) adds to the gradients that are there, summed once for all its microbatches",
    "gradient_checkpointing_enable": "recompute='selective' or 'full', of csc.compile or compiled.with_options(...)",
}
MOVES = ("half", "float", "double", "bfloat16", "type", "to_empty", "xpu", "ipu", "mtia")
INSTEAD |= dict.fromkeys((*devices.TYPES, *MOVES), INSTEAD["to"])
COPIES = (
    "a compiled model is not copied or pickled: copy.deepcopy(compiled.gather()) copies the eager model (for averaged "
    "weights), compiled.save(directory) writes it, compiled.with_options(...) makes another program of the same weights"
)


def instead(name: str, there: list[str], model: nn.Module | None) -> AttributeError:
    """The error for an attribute that a compiled model has not. there: those that it has; model: what it compiles."""
    if name in INSTEAD:
        return AttributeError(f"a compiled model has no {name!r}: {INSTEAD[name]}")
    if name in dir(model):  # without running the model's code
        return AttributeError(f"a compiled model has no {name!r}; its eager model has: compiled.model.{name}")
    close = difflib.get_close_matches(name, [attribute for attribute in there if not attribute.startswith("_")], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return AttributeError(f"a compiled model has no {name!r}{hint}")


# --- What commands, reports and planners read of a compiled model, which takes no step for it ------------------------


class Inspected:
    """Of what makes these steps."""

    def __init__(self, steps: Steps) -> None:
        self._programs, self._given, self._steps = steps.programs, steps.given, steps

    @property
    def _options(self) -> Options:
        return self._steps.options()

    @property
    def microbatch(self) -> dict[str, Any]:
        """The example's first microbatch of those with the most entries; all of the example if none has all entries."""
        return self._given.microbatch(self._options)

    @property
    def axes(self) -> Mapping[str, int]:
        """Along which dimension samples of an entry lie, where `divide=` says so."""
        return self._programs.settings.axes

    def microbatches(self, batch: Any) -> list[dict[str, Any]]:
        """What a step divides a batch into, replica after replica."""
        return self._given.padded(self._given.ready(batch, self._options))

    def complete(self, batch: Any) -> list[dict[str, Any]]:
        """The microbatches of a batch as the runtime takes them. InputError: one does not fit its program."""
        trainer = self._steps.trainer(batch, check=False)
        return self._steps.complete(self._programs.set.match(self.microbatches(batch)), trainer)

    @property
    def progress(self) -> Progress:
        """Called with the name of each step of a compilation."""
        return self._programs.progress

    @progress.setter
    def progress(self, tell: Progress) -> None:
        self._programs.progress = tell

    @property
    def options_text(self) -> str:
        """The mesh, the microbatches and what is frozen."""
        options = self._options
        many = "microbatch" if options.microbatches == 1 else "microbatches"
        frozen = f", frozen: {', '.join(options.freeze)}" if options.freeze else ""
        return f"{options.mesh}, {options.microbatches} {many}{frozen}"

    @property
    def mesh_text(self) -> str:
        """How csc chose the mesh; "" if it did not."""
        chosen = self._programs.chosen
        return chosen[1] if chosen is not None and chosen[0] == self._options.mesh else ""

    def prepare(self) -> None:
        """Compile for the example batch, unless the cache has the program."""
        self._programs.current().compiled.prepare(self.microbatch, self._options, self._programs.progress)

    @property
    def program(self) -> Program:
        """The finished Program for the example batch."""
        return self._programs.current().compiled.finished(self.microbatch, self._options, self._programs.progress)

    def history(self, batch: Any, microbatches: int | None) -> list[Program]:
        """The Program after capture and each pass, for a batch's fullest microbatch; None: the example's."""
        options = self._steps.options(microbatches)
        ready = self._given.ready(self._given.example if batch is None else batch, options)
        return self._programs.current().compiled.history(fullest(ready), options, self._programs.progress)

    def problem(self, microbatch: Mapping[str, Any]) -> Problem:
        """What this microbatch takes of every region: seconds and bytes for planners. It is traced, not compiled.

        Regions for which `recompute="auto"` decided keep what it decided for the example.
        """
        options = self._options
        if any(choice == AUTO for _, choice in options.recompute):
            options = replace(options, recompute=saves_of(self.program))
        return self._programs.current().compiled.problem(microbatch, options, self._programs.progress)

    def divided(self, microbatch: Mapping[str, Any]) -> Program:
        """The Program of a microbatch after pass `split`: F, B and W of every region, which is what is costed."""
        return self._programs.current().compiled.divided(microbatch, self._options, self._programs.progress)[1]

    def step_without_chance(self, batch: Any) -> EagerStep:
        """Loss and gradients of one step in which random numbers are constants, unchecked; `.grad` stays as it is. For
        comparisons, in one process.
        """
        self._given.check(batch)
        return step_of(self._steps.trainer(batch, check=False), self.complete(batch))

    def of_first(self, make: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
        """What `make` returns on the first rank, on every rank. All ranks call it; errors are raised on all."""
        return self._programs.set.of_first(make, self._options)

    def write(self, directory: str | Path, with_weights: bool, ranks: Iterable[int] | None) -> Path:
        """Write the program directory of the example. InputError if a directory cannot be one for it."""
        wanted = None if ranks is None else checked_ranks(self._options.mesh, ranks)
        if self._programs.settings.features is not None:
            raise InputError(
                "its steps take the features of a frozen encoder, which csc.run does not make",
                str(directory),
                "compile without cache_features and encode_ahead to write a directory",
            )
        compiled, progress = self._programs.current().compiled, self._programs.progress
        guards = compiled.finished(self.microbatch, self._options, progress).guards
        if guards is not None and guards.decisions:
            raise InputError(
                f"the model decides by its batch, and a directory is for one answer: {'; '.join(guards.answers)}",
                str(directory),
                "train with compiled.train_step, which asks every batch; or pass the answer in as a plain value",
            )
        return compiled.write(self.microbatch, self._options, Path(directory), progress, with_weights, wanted)


# --- A compiled model: the programs for its batches, and the training loop's half of csc -----------------------------
#
#     loss = compiled.train_step(batch)      .parameters()      .clip_grad_norm_(1.0)      .save(directory)
#     phase2 = compiled.with_options(freeze=["vision_tower"])
#
# How steps are made is in csc.driver.steps, what is compiled for them in csc.driver.model_programs.


class CompiledModel:
    """A model as per-rank programs. Holds one program for all batches of a kind; all of them share the parameters.

    Attributes:
        inspected: What commands and reports read of it: csc.driver.compiled.
    """

    def __init__(self, programs: ModelPrograms, given: GivenBatches, options: Options) -> None:
        self._all, self._given = programs, given
        self._steps = Steps(programs, given, options)
        self.inspected = Inspected(self._steps)
        self._nothing = nn.Parameter(torch.empty(0))

    # --- what it is made of --------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """What it was compiled with; with another mesh once ranks with mirrors have gone on without one."""
        return self._steps.options()

    @property
    def metrics(self) -> dict[str, float]:
        """Figures of the last `train_step`: loss, tokens, samples, seconds, tokens_per_second, samples_per_second,
        peak_memory and planned_memory (bytes), mfu where the hardware profile has the device's peak, and grad_norm once
        it was clipped or read. Seconds, rates and memory are those of this process; the others are equal on all ranks.
        """
        return self._steps.metrics

    @property
    def compiler(self) -> Compiler:
        """The compiler of the model; a factory is called here, once."""
        return self._all.compiler

    @property
    def _programs(self) -> ProgramSet:
        return self._all.set

    @property
    def model(self) -> nn.Module:
        """The eager model. Its parameters are those that train (in one process: all of them)."""
        return self.compiler.model

    @property
    def example(self) -> Example:
        """The example batch. InputError if none was given."""
        return self._given.example

    def with_options(
        self, directory: str | Path | None = None, check: bool | int | None = None, **changes: Any
    ) -> CompiledModel:
        """The same model and traces with other options: mesh, freeze, cuts, stages, schedule, microbatches, and so on.

        A new frozen set is compiled without tracing again: `phase2 = phase1.with_options(freeze=["vision_tower"])`.

        Args:
            directory: Where the new program is written; None: a temporary directory.
            check: As for `csc.compile`; None: as for this one.
            **changes: Options of `csc.compile` that decide the program.

        Returns:
            Another CompiledModel, which trains the same parameters.

        Raises:
            InputError: An option is unknown or wrong.
        """
        options = closed(changed(self.options, **changes))
        programs = self._all.after(Path(directory) if directory is not None else None, check)
        return CompiledModel(programs, self._given.of(programs), options)

    def with_example(self, example: Example) -> CompiledModel:
        """The same model and options with another example, as if nothing had been compiled or trained."""
        programs = self._all.anew()
        return CompiledModel(
            programs, GivenBatches(example, self._given.dividing, programs, self._given.widths), self.options
        )

    def history(self, batch: Any = None, microbatches: int | None = None) -> list[Program]:
        """The Program after capture and each pass, for a batch's first microbatch (the example's by default).

        The cache has the finished program and the traced graphs, not what lies between: the model is traced for it.
        """
        return self.inspected.history(batch, microbatches)

    @property
    def passes(self) -> Pipeline:
        """The passes that its programs are made by, with what the options say of them; it prints as a line."""
        return pipeline_of(self.options)

    def prepare(self) -> None:
        """Compile for the example batch, unless the cache has the program."""
        self.inspected.prepare()

    @property
    def program(self) -> Program:
        """The finished Program for the example batch."""
        return self.inspected.program

    def write(self, directory: str | Path, with_weights: bool = False, ranks: Iterable[int] | None = None) -> Path:
        """Write the program directory for the example batch, for `python -m csc.run`.

        Args:
            directory: Where to; a program that is there is replaced.
            with_weights: Also write the parameters, as safetensors.
            ranks: Write the files of these ranks alone, and what they share with others: a directory that runs them.

        Returns:
            The directory.

        Raises:
            InputError: Something else is there, the mesh does not have a rank, or the program holds for what this
                batch decides alone: a directory asks nothing.
        """
        return self.inspected.write(directory, with_weights, ranks)

    # --- as an nn.Module --------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **batch: Any) -> NoReturn:
        """Says what to call: a step is `train_step(batch)`."""
        raise InputError("a compiled model is not called", "compile", INSTEAD["forward"])

    def __getattr__(self, name: str) -> NoReturn:
        model = self.model if "_all" in vars(self) else None  # not while it is being copied
        raise instead(name, dir(type(self)), model)

    def __repr__(self) -> str:
        return f"CompiledModel({self._all.name}, {self.inspected.options_text}; its modules: compiled.model)"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Says what to copy."""
        raise TypeError(COPIES)

    @property
    def training(self) -> bool:
        """Whether the model is."""
        return self.model.training

    def train(self, mode: bool = True) -> CompiledModel:
        """Set the model to training mode, which a step needs, or with False to eval mode. Returns self."""
        self.model.train(mode)
        return self

    def eval(self) -> CompiledModel:
        """Set the model to eval mode, to run what `gather()` returns. `train_step` is refused until `train()`."""
        return self.train(False)

    # --- training ------------------------------------------------------------------------------------------------

    def trainer(self, batch: Any = None, microbatches: int | None = None, check: bool = True) -> Trainer:
        """The runtime for a batch (the example by default); the programs of its microbatches are emitted and loaded.

        Args:
            batch: As for `train_step`; None: the example.
            microbatches: As for `train_step`.
            check: False leaves out the comparison with eager PyTorch that new programs are due.
        """
        return self._steps.trainer(batch, microbatches, check)

    @property
    def checks(self) -> bool:
        """Whether new programs are compared with eager PyTorch."""
        return bool(self._all.settings.check)

    def check(self) -> str:
        """Compare the example's program with eager PyTorch, unless that was done.

        Returns:
            The outcome, as a sentence.

        Raises:
            DifferenceError: The program would not train what eager PyTorch trains.
        """
        return self._steps.check()

    @property
    def dp_rank(self) -> int:
        """The index of the share of samples that this process loads for `train_step(batch, local=True)`."""
        return place(self.options.mesh)[0]

    @property
    def dp_size(self) -> int:
        """The number of shares: under torchrun the mesh's dp; a single process loads all samples."""
        return place(self.options.mesh)[1]

    @property
    def needs(self) -> frozenset[str]:
        """The entries of a batch that have to be loaded in this process; the others, features that only other ranks
        read, may be left out of a local batch. All ranks call it: the example's program is made if there is none.
        """
        return self._steps.needs

    @property
    def encodes_ahead(self) -> bool:
        """Whether a step encodes features of the next batch, which `train_step(ahead=)` or `ahead()` must tell."""
        return self._steps.encodes_ahead is not None

    def cut(self, batch: Any, parts: int) -> list[dict[str, Any]]:
        """Divide a batch into `parts` microbatches with equal numbers of samples.

        Raises:
            InputError: The batch cannot be divided so.
        """
        return self._given.cut(batch, parts)

    def gather(self) -> nn.Module:
        """Bring what any rank has trained or loaded into `model`, in every process; returns it. All ranks call it.

        For what needs the whole model: evaluation, `generate`, `save_pretrained` (PEFT's writes adapters alone).
        """
        without_dead(self._steps.gather)
        return self.model

    def train_step(
        self, batch: Any, microbatches: int | None = None, local: bool = False, ahead: Any = None
    ) -> torch.Tensor:
        """Forward and backward of the whole batch; gradients go to `.grad` as autograd would put them.

        If the model has a method `check_batch(batch)`, it is called first: what a compiled step cannot decide, because
        it depends on values of the batch, is decided there, by raising.

        Args:
            batch: The global batch, the same on every rank, or a list of ready microbatches (replica by replica), which
                may differ in length. Another length is compiled once, from the same trace.
            microbatches: Their number, in place of that of the options.
            local: The batch has the samples of this process' replica alone (share `dp_rank` of `dp_size`), as many as
                that has and of any size; loss and gradients are those of all of them together. Features that the
                process does not need (`needs`) may be left out, or on the meta device. In one process, which runs all
                replicas, it is the global batch. What a loader of `csc.balanced` yields is local.
            ahead: The next step's batch, with `encode_ahead=True`; another one may come then.

        Returns:
            The loss of the whole batch: a tensor without dimensions, the same on every rank, and without a graph: its
                `backward()` says that it was done.

        Raises:
            InputError: The batch does not fit: other keys or dtypes than the example's, ids beyond the vocabulary.
            StepFailed: Another rank cannot do the step. No gradient is touched on any, and the next is in order.
            RankLost: Another rank ended, or was silent for `timeout` seconds.
            DifferenceError: A new program does not train what eager PyTorch trains.
        """
        return StepLoss.of(self._steps.train(batch, microbatches, local, ahead))

    def compile_for(self, batch: Any, microbatches: int | None = None, local: bool = False) -> None:
        """Make the programs of a batch's microbatches, and compare them with eager PyTorch, without a step: later steps
        of these sizes start at once. All ranks call it. Arguments and errors are those of `train_step`.
        """
        self._steps.compile_for(batch, microbatches, local)

    def eval_step(self, batch: Any, microbatches: int | None = None, local: bool = False) -> torch.Tensor:
        """The loss of a batch as the model in eval mode computes it (no dropout), without gradients.

        Forward-only programs, cut as those that train, run pipelined: no rank has the whole model, nothing is saved,
        `.grad` stays as it is. The model is captured once more for it, in eval mode, at the first call. All ranks call
        it. The model's own mode is as before afterwards. Arguments and errors are those of `train_step`.

        Returns:
            The loss of the whole batch: a tensor without dimensions, the same on every rank.
        """
        return self._steps.evaluate(batch, microbatches, local)

    def ahead(self, batches: Iterable[Any], depth: int = 1) -> Iterator[Any]:
        """The batches, in order, each with its context-parallel plans made while the batch before is trained on:

            for batch in compiled.ahead(loader):
                loss = compiled.train_step(batch)

        One thread fetches and plans `depth` batches ahead (at least 1); an error of the loader comes in place of its
        batch. Results are those of `train_step` alone: a batch that is changed after all is planned in its step, as is
        that of a model whose own code runs before it. With `encode_ahead` a step knows the batch after it, too. `save`
        and checkpoints write the loader's position behind the batch that is trained on, not behind what was fetched.
        """
        return self._steps.ahead(batches, depth)

    def timeline(self, batch: Any, microbatches: int | None = None) -> Timeline:
        """One `train_step` that also records when every rank ran what; see `csc timeline`. All ranks call it.

        A first step is slower than later ones (memory, kernels and imports are new): if this model has made none, one
        is made before, whose gradients are dropped. Arguments and errors are those of `train_step`.

        Returns:
            Times in seconds since the step began, of the first replica. Gradients are added as by `train_step`. On a
                GPU an action's time is that of its launch.
        """
        return self._steps.timeline(batch, microbatches)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of what trains on this process' ranks, under the model's own names. With `zero`, of several
        processes each has its shard of each parameter, with the gradient of that. Behind them stands what this process
        keeps for another rank (csc.Survive(1, mirror=True)): an optimizer steps that, too.
        """
        return self._steps.of_parameters.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What trains on this process' ranks; give it to an optimizer.

        On a rank of frozen layers only: one parameter without elements, since torch.optim refuses an empty list.
        """
        parameters = list(self._steps.of_parameters.parameters())
        return iter(parameters or [self._nothing])

    def optimizer(
        self, make: Callable[..., torch.optim.Optimizer], parameters: Iterable[Any] | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer over what trains on this process' ranks: `compiled.optimizer(torch.optim.AdamW, lr=1e-4)`.

        Where ranks divide parameters (tp, zero), a trial shows first whether the optimizer works entry by entry.

        Args:
            make: A class of torch.optim or like one, or a function from parameters to an optimizer.
            parameters: As torch takes them (groups, or pairs with names), out of `parameters()` or
                `named_parameters()`; None: all.
            **options: Further arguments of `make`.

        Returns:
            The optimizer that `make` returned.

        Raises:
            InputError: The optimizer does not work entry by entry where parameters are divided, or some are not those
                of this process.
        """
        chosen = self.parameters() if parameters is None else parameters
        optimizer = make_optimizer(self._steps.of_parameters, make, chosen, **options)
        self._steps.made(optimizer)
        return optimizer

    def rejoin(self) -> int:
        """Take the place of a rank that was lost, killed or spare, in a job with `survive=`: to be called right after
        `csc.compile`, in every process. It waits until all that were lost have been started again and the others begin
        a step; a `compiled.optimizer(...)` made after it has the state of theirs.

        Returns:
            The number of steps that the job has trained: 0 at its start.

        Raises:
            InputError: Nothing can be survived, there is no example, or the job takes up nobody.
            RankLost: The job does not take it up within `timeout`.
        """
        return self._steps.rejoin()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this process' parameters."""
        self._steps.current.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients, over all ranks, so that all together have a 2-norm of `max_norm` at most. All ranks call
        it.

        Returns:
            The norm before: a tensor without dimensions, the same on every rank.
        """
        return self._steps.clip(max_norm)

    # --- on disk ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's tensors by name, as nn.Module's. Of several processes each has the parameters of its own ranks
        alone, or with `zero` and `tp` its parts of them: `gather().state_dict()` is the whole model there.
        """
        state = self._steps.current.state_dict()
        return state if several_processes() else {**self.model.state_dict(), **state}

    def load(self, path: str | Path, loader: Any = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read the weights of this process' ranks from safetensors: a file, or a directory as `save` or HF write it.

        Of a directory's shards only the tensors that these ranks hold are read, and those that the step does not use,
        for a later `save`. A model on the meta device stays there: each rank makes its own parameters only, and what
        the step does not use is kept by the rank that saves it. All ranks call it.

        Args:
            path: A safetensors file, or a directory with one or with shards and an index.
            loader: Put where it was when `save(directory, loader=...)` wrote `path`.
            optimizer: Given the state that `save(directory, optimizer=...)` wrote there, on whatever mesh.

        Raises:
            InputError: A tensor is missing, of another shape or dtype, or damaged; or the optimizer's state is of
                another optimizer or of other weights, which are loaded then.
        """
        training_state.load(path, self.saved(loader, optimizer))

    def save(self, directory: str | Path, loader: Any = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write the weights as safetensors; each rank writes what it owns. All ranks call it.

        Parameters that the step does not use are written as they are: the directory holds the whole model. Of a
        transformers model it is one that `from_pretrained` reads; else names are the model's own.

        Args:
            directory: Where to. What was saved there before is replaced once all is written.
            loader: Whose position is written too, of each share of the samples by one rank; anything with state_dict()
                and load_state_dict(), such as torchdata's StatefulDataLoader.
            optimizer: Whose state is written too, by the names of parameters: `load` gives it to an optimizer on any
                mesh.

        Raises:
            InputError: A file is where a directory is to be made, or it cannot be written.
        """
        without_dead(lambda: training_state.save(directory, self.saved(loader, optimizer)))

    def saved(self, loader: Any, optimizer: torch.optim.Optimizer | None) -> Saved:
        """What there is of it to be saved and loaded: for csc.driver.training_state and checkpoints."""
        self._steps.settle()
        loader = self._steps.behind(loader)
        trainer, survival = self._steps.current, self._programs.survival
        mesh = self.options.mesh if survival is None else survival.mesh
        return Saved.of(self.model, trainer, self._programs, mesh, loader, optimizer)

    @property
    def survive(self) -> Survive | None:
        """Which ranks may die, and what is done for that."""
        return self._all.settings.survive

    def save_adapter(self, directory: str | Path) -> None:
        """Write a PEFT model's adapters in PEFT's own format: adapter_model.safetensors and adapter_config.json.

        `PeftModel.from_pretrained(base_model, directory)` reads them. All ranks call it, the first one writes.

        Raises:
            InputError: The model is not PEFT's.
        """
        training_state.save_adapter(self.model, self.gather, directory)
