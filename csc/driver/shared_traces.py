"""The passes that trace, run for many divisions of one model: what two of them have in common is made once.

Terms
  begun       the Programs of the passes up to `loss`: the same whatever tp is, unless a component has a tp of its own
  cut         what pass `regions` made of a graph: it looks at nothing else
  joints      joint graphs of layers by pass `differentiate`, by the capture that they are of

SharedTraces().history(key, captured, options, progress) -> [Program]     after the capture and after each pass
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from torch import fx

from csc.capture.capture import name_of
from csc.ir.capture_guards import Joints
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.passes.loss import loss
from csc.passes.regions import regions
from csc.passes.runner import TRACING, run

Progress = Callable[[str], None]
BEGUN = 1 + TRACING.index(loss)
CUT = TRACING.index(regions)


@dataclass
class SharedTraces:
    """Of one model; what it keeps serves every division that is asked for later."""

    begun: dict[Hashable, tuple[Program, ...]] = field(default_factory=dict)
    cut: dict[fx.Graph, Program] = field(default_factory=dict)  # by the graph that was cut
    joints: dict[str, Joints | None] = field(default_factory=dict)  # by the name of the capture

    def history(self, key: Hashable, captured: Program, options: Options, progress: Progress) -> list[Program]:
        """The Program after the capture and after each of TRACING.

        key: of what the passes up to `loss` look at, for options `undivided` by tp. captured: with the sizes of its
        microbatch. options: of one microbatch and one replica.
        """
        history = self._cut(self._begun(key, captured, options, progress), options, progress)
        history = run(history, TRACING[len(history) - 1 :], options, progress)
        self.joints[name_of(captured)] = history[-1].joints
        return history

    def _begun(self, key: Hashable, captured: Program, options: Options, progress: Progress) -> list[Program]:
        *before, last = self.begun.get(key) or (captured,)
        with_joints = replace(last, joints=self.joints.get(name_of(captured)))
        history = run([*before, with_joints], TRACING[len(before) : CUT], options, progress)
        self.begun.setdefault(key, tuple(history[: BEGUN + 1]))
        return history

    def _cut(self, history: list[Program], options: Options, progress: Progress) -> list[Program]:
        whole = history[-1]
        cut = self.cut.get(whole.graph)
        if cut is None:
            history = run(history, [regions], options, progress)
            self.cut[whole.graph] = history[-1]
            return history
        return [*history, replace(
            whole, regions=cut.regions, templates=cut.templates, shared=cut.shared, loss_tokens=cut.loss_tokens,
            history=(*whole.history, cut.history[-1]),
        )]  # fmt: skip


def undivided(options: Options) -> Options:
    """Without what the passes up to `loss` do not look at: how tp divides layers, whether logits are whole."""
    mesh: Mesh = options.mesh if options.mesh.components else replace(options.mesh, tp=1)
    return replace(options, mesh=mesh, sequence_parallel=False, loss_chunk=None, fuse=False, replicate=())
