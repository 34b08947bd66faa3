"""`off`: proposes nothing; every step verifies roots alone, which is plain decoding."""

from __future__ import annotations

from specengine.core.plan import StepPlan
from specengine.runner.sequence_table import SequenceTable
from specengine.spec.drafter import Capabilities, DrafterContext, Proposed, tip_rows
from specengine.spec.verifier import Acceptance
from specengine.tree import TreeBatch


class OffDrafter:
    capabilities = Capabilities(max_width=1)

    def __init__(self, context: DrafterContext):
        del context

    def begin(self, table: SequenceTable, plan: StepPlan) -> Proposed:
        return Proposed(TreeBatch.empty(tip_rows(plan)))

    def observe(self, table: SequenceTable, trees: TreeBatch, acceptance: Acceptance) -> dict[int, int]:
        return {}

    def release(self, rows: list[int]) -> None:
        """Nothing is kept."""


DRAFTER = OffDrafter
