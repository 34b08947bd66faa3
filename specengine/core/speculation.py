"""`SpeculationPolicy`: how much each sequence may draft. Decides from past steps only, never from a drafted token.

    policy = FixedBudget(num_speculative_tokens=8, tree_width=4)
    budgets = policy.budgets(sequences, num_running)
"""

from __future__ import annotations

from typing import Protocol

from specengine.core.plan import DraftBudget, StepResult
from specengine.core.sequence import Sequence


class SpeculationPolicy(Protocol):
    def budgets(self, sequences: list[Sequence], num_running: int) -> list[DraftBudget]:
        """One budget a sequence, in order; `max_nodes` 0 is no drafting. The planner bounds it by tokens and blocks."""
        ...

    def observe(self, result: StepResult) -> None:
        """Learns from a step that is over."""
        ...


class FixedBudget:
    """The same budget every step, the request's own settings considered."""

    def __init__(self, num_speculative_tokens: int, tree_width: int, tree_depth: int | None = None, max_concurrency: int | None = None):
        self.num_speculative_tokens = num_speculative_tokens
        self.tree_width = tree_width
        self.tree_depth = tree_depth
        self.max_concurrency = max_concurrency

    def budgets(self, sequences: list[Sequence], num_running: int) -> list[DraftBudget]:
        crowded = self.max_concurrency is not None and num_running > self.max_concurrency
        return [self._budget(s, crowded=crowded) for s in sequences]

    def observe(self, result: StepResult) -> None:
        """A fixed budget has nothing to learn."""

    def _budget(self, sequence: Sequence, *, crowded: bool) -> DraftBudget:
        asked = sequence.request.sampling.speculation
        own = asked if isinstance(asked, dict) else {}
        nodes = min(own.get("num_speculative_tokens", self.num_speculative_tokens), self.num_speculative_tokens)
        if crowded or asked is False or own.get("method") == "off" or own.get("enabled") is False:
            nodes = 0
        depth = own.get("tree_depth") or self.tree_depth or nodes
        width = own.get("tree_width", self.tree_width)
        return DraftBudget(sequence.row, nodes, min(depth, nodes), width)
