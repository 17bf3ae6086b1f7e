"""A rank's part in the passes of a step that several engines make together, because they share experts.

The plan has the rows of all engines (`SchedulerOutput.rows_by_engine`), so every rank knows all passes of a step: the
model's over the tokens, and those of a module for drafts with experts: over the tokens, and then one after another over
the requests that sample. A rank makes those in which its engine has rows as usual. In the others it only computes its
experts for the rows of other engines, in the same order. Every step ends with a barrier, so that a rank that has made
other passes than the others is noticed at once: their calls disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.messages.experts import ExpertsOutput, RowCounts
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.models.experts import PlacedExperts, placed_experts
from penstock.models.mtp import MultiTokenPredictor
from penstock.parallel.groups import TensorGroup
from penstock.runner.expert_mover import ExpertMover, ExpertStep, NoExpertStep
from penstock.runner.loaded_model import LoadedModel


class SharedExpertStep:
    """An `ExpertStep`, which does `inner` too. `target` and `draft` are the experts of this rank's layers in order,
    which `ranks` divide.
    """

    def __init__(
        self, inner: ExpertStep, ranks: TensorGroup, target: Sequence[PlacedExperts], draft: Sequence[PlacedExperts]
    ) -> None:
        self._inner = inner
        self._ranks = ranks
        self._target = target
        self._draft = draft

    def begin(self, plan: SchedulerOutput) -> None:
        self._inner.begin(plan)
        if not plan.uses_experts:
            return
        passes = expert_passes(plan.rows_by_engine)
        for layer in self._target:
            layer.expect(passes[:1])
        for layer in self._draft:
            layer.expect(passes)

    def skip(self) -> None:
        _run_along(self._target)

    def end(self) -> ExpertsOutput:
        _run_along(self._draft)
        self._ranks.barrier()
        return self._inner.end()

    def shutdown(self) -> None:
        self._inner.shutdown()


def expert_passes(rows: Sequence[RowCounts]) -> list[tuple[int, ...]]:
    """Returns the rows of each engine in a step's passes over tokens, and then in each that drafts one token more."""
    drafting = range(1, max(each.num_drafts for each in rows))
    following = [tuple(each.num_sampling if place < each.num_drafts else 0 for each in rows) for place in drafting]
    return [tuple(each.num_tokens for each in rows), *following]


def _run_along(layers: Sequence[PlacedExperts]) -> None:
    """Makes the expected passes that are left, each through all layers."""
    while sum(layer.run_along() for layer in layers):
        pass


def make_expert_step(loaded: LoadedModel, memories: Mapping[str, Sequence[Sequence[str]]], stage: int) -> ExpertStep:
    """Chooses how a rank of this stage handles its experts. `memories` are those of `ExpertMover`, if experts move."""
    step: ExpertStep = NoExpertStep()
    if any(each.memories for each in loaded.experts.values()):
        step = ExpertMover(loaded.experts, memories, (stage, loaded.links.experts.index))
    ranks = loaded.links.shared_experts
    if ranks is None:
        return step
    drafter = loaded.drafter
    draft = placed_experts([drafter.layer]) if isinstance(drafter, MultiTokenPredictor) else {}
    target = [each for name, each in loaded.experts.items() if name not in draft]
    return SharedExpertStep(step, ranks, target, list(draft.values()))
