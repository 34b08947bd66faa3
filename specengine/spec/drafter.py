"""`Drafter`: what proposes trees. One file each in `drafters/`, found by its module's name.

Owns the interface. A drafter never touches the target's randomness, and never drops a token that it sampled for a rule
that knows its law.

    drafter = DRAFTERS.get("ngram")(context)
    trees = drafter.begin(table, plan).result()
    lag = drafter.observe(table, trees, acceptance)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specengine.config import SpeculativeConfig
from specengine.core.plan import StepPlan
from specengine.registry import Registry
from specengine.runner.model_runner import ModelRunner
from specengine.runner.sequence_table import SequenceTable
from specengine.spec.verifier import Acceptance
from specengine.tree import TreeBatch

DRAFTERS = Registry("specengine.spec.drafters", export="DRAFTER", kind="drafter")


@dataclass(frozen=True)
class Capabilities:
    max_width: int  # widest tree it makes; 1 is chains only
    has_kv: bool = False  # keeps KV of its own in the sequence's blocks, and may have to catch up
    reports_probs: bool = False  # can carry the law of each token for rules that need it
    needs_hidden_taps: bool = False


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is made from."""

    speculative: SpeculativeConfig
    max_rows: int
    num_blocks: int
    num_token_ids: int  # ids from here on are never proposed
    runner: ModelRunner | None = None  # the draft model, for drafters that have one


@dataclass(frozen=True)
class Proposed:
    """A proposal that is complete when `begin` returns."""

    trees: TreeBatch

    def result(self) -> TreeBatch:
        return self.trees


class Drafter(Protocol):
    capabilities: Capabilities

    def begin(self, table: SequenceTable, plan: StepPlan) -> Proposed:
        """Drafts for the plan's budgets. The trees cover the plan's tip sequences, in order; empty without a budget."""
        ...

    def observe(self, table: SequenceTable, trees: TreeBatch, acceptance: Acceptance) -> dict[int, int]:
        """Learns what was accepted, after the table has grown. Returns by row how many tokens its KV lacks."""
        ...

    def release(self, rows: list[int]) -> None:
        """Forgets rows that left the table."""
        ...


def tip_rows(plan: StepPlan) -> list[int]:
    """Rows of the plan that sample in this step, in its order."""
    return [s.row for s in plan.scheduled if s.is_tip]
