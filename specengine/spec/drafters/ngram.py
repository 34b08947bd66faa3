"""`ngram`: proposes what followed the text's last words where they stood before (prompt lookup; Saxena 2023).

Owns one index a row over prompt and output: each n-gram's latest places. The longest n-gram that ends the text and
stands earlier wins; several different continuations share one tree. Costs no forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specengine.core.plan import DraftBudget, StepPlan
from specengine.runner.sequence_table import SequenceTable
from specengine.spec.drafter import Capabilities, DrafterContext, Proposed, tip_rows
from specengine.spec.verifier import Acceptance
from specengine.tree import DraftTree, TreeBatch

PLACES = 4  # latest places kept of an n-gram


@dataclass
class RowIndex:
    """`places[n-gram]` lists positions of the tokens that followed it, oldest first."""

    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class NgramDrafter:
    capabilities = Capabilities(max_width=PLACES)

    def __init__(self, context: DrafterContext):
        self.longest = context.speculative.prompt_lookup_max
        self.shortest = context.speculative.prompt_lookup_min
        self._rows: dict[int, RowIndex] = {}

    def begin(self, table: SequenceTable, plan: StepPlan) -> Proposed:
        budgets = {budget.row: budget for budget in plan.budgets}
        trees = []
        for row in tip_rows(plan):
            budget = budgets.get(row)
            trees.append((row, self._propose(table, budget) if budget else DraftTree.empty()))
        return Proposed(TreeBatch.from_trees(trees))

    def observe(self, table: SequenceTable, trees: TreeBatch, acceptance: Acceptance) -> dict[int, int]:
        return {}

    def release(self, rows: list[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)

    def _propose(self, table: SequenceTable, budget: DraftBudget) -> DraftTree:
        index = self._updated(table, budget.row)
        for size in range(min(self.longest, len(index.tokens) - 1), self.shortest - 1, -1):
            places = index.places.get(tuple(index.tokens[-size:]))
            if places:
                return merged_continuations(index.tokens, places[::-1][: budget.max_width], budget)
        return DraftTree.empty()

    def _updated(self, table: SequenceTable, row: int) -> RowIndex:
        """Adds the tokens since the last step: every n-gram that one of them follows."""
        index = self._rows.setdefault(row, RowIndex())
        tokens = index.tokens
        for token in table.token_ids[row, len(tokens) : table.num_tokens[row]].tolist():
            end = len(tokens)
            for size in range(self.shortest, min(self.longest, end) + 1):
                places = index.places.setdefault(tuple(tokens[end - size :]), [])
                places.append(end)
                del places[:-PLACES]
            tokens.append(token)
        return index


def merged_continuations(tokens: list[int], places: list[int], budget: DraftBudget) -> DraftTree:
    """One tree of the texts from each place on, the latest first and with half of the nodes where others differ."""
    tree = DraftTree.empty()
    for order, place in enumerate(places):
        left = budget.max_nodes - len(tree)
        share = left if order == len(places) - 1 else -(-left // 2)
        chain = DraftTree.chain(tokens[place : place + min(share, budget.max_depth)], "ngram")
        tree = tree.merge(chain)
    if len(set(tree.parents)) == len(tree):  # all places agree: one chain may use every node
        tree = DraftTree.chain(tokens[places[0] : places[0] + min(budget.max_nodes, budget.max_depth)], "ngram")
    return tree


DRAFTER = NgramDrafter
