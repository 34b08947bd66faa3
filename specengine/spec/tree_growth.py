"""Growing one draft tree level by level, best-first under a budget (after EAGLE-2, Li et al., 2406.16858).

Owns candidates, their scores, and which of them are expanded; a score never exceeds its parent's, so the best N
candidates always form a tree. Expanded nodes never outnumber the budget: each needs a slot for the draft's KV. Knows
nothing about models.

    growth = TreeGrowth(budget)
    growth.add(ROOT, tokens, scores)
    frontier = growth.frontier()
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specengine.core.plan import DraftBudget
from specengine.spec.rule import ROOT
from specengine.spec.types import Floats
from specengine.tree import DraftTree, Selection

NOT_EXPANDED = -1


@dataclass
class Candidate:
    token: int
    parent: int  # candidate index, ROOT for the first level
    depth: int
    score: float  # accumulated log of the estimated chance that the whole path is accepted
    rank: int = 0  # among its siblings
    gap: float = 0.0  # feature of its own step: how far it is from its best rival
    expanded: int = NOT_EXPANDED  # order of expansion: the draft's KV lies at tree_start + expanded


@dataclass
class TreeGrowth:
    budget: DraftBudget
    candidates: list[Candidate] = field(default_factory=list)
    num_expanded: int = 0
    laws: list[Floats] = field(default_factory=list)  # draft's law of each chain token, for rules that need it
    _new: list[int] = field(default_factory=list)

    def add(self, parent: int, tokens: list[int], steps: list[float], gaps: list[float]) -> None:
        """Children of a candidate, best first: tokens, log-chances of this step (at most 0), and the gaps they came from."""
        base = self.candidates[parent].score if parent != ROOT else 0.0
        depth = self.candidates[parent].depth + 1 if parent != ROOT else 1
        for rank, (token, step, gap) in enumerate(zip(tokens, steps, gaps, strict=True)):
            self._new.append(len(self.candidates))
            self.candidates.append(Candidate(token, parent, depth, base + min(step, 0.0), rank, gap))

    def frontier(self) -> list[int]:
        """Candidates of the last level that are worth a forward pass, in order; marks them as expanded."""
        new, self._new = self._new, []
        best = set(self.best())
        chosen = [i for i in new if i in best and self.candidates[i].depth < self.budget.max_depth]
        chosen.sort(key=lambda i: -self.candidates[i].score)
        chosen = chosen[: self.budget.max_nodes - self.num_expanded]
        for i in chosen:
            self.candidates[i].expanded = self.num_expanded
            self.num_expanded += 1
        return chosen

    def best(self) -> list[int]:
        """The max_nodes best candidates; a parent is never after its child, as ties go to the earlier one."""
        order = sorted(range(len(self.candidates)), key=lambda i: (-self.candidates[i].score, i))
        return order[: self.budget.max_nodes]

    def path(self, candidate: int) -> list[int]:
        """Candidate indices from the first level down to this one."""
        path = []
        while candidate != ROOT:
            path.append(candidate)
            candidate = self.candidates[candidate].parent
        return path[::-1]

    def path_tokens(self, candidate: int) -> list[int]:
        return [self.candidates[i].token for i in self.path(candidate)]

    def words(self, candidates: list[int]) -> np.ndarray:
        """int64 [n, words] ancestor-or-self bits of expanded candidates, by order of expansion."""
        count = max(1, -(-self.budget.max_nodes // 64))
        masks = np.zeros((len(candidates), count), np.uint64)
        for place, candidate in enumerate(candidates):
            for ancestor in self.path(candidate):
                bit = self.candidates[ancestor].expanded
                masks[place, bit // 64] |= np.uint64(1) << np.uint64(bit % 64)
        return masks.view(np.int64)

    def tree(self, source: str) -> tuple[DraftTree, list[int]]:
        """The best candidates as a tree, likeliest branch first so that its path is contiguous, and their indices."""
        chosen = set(self.best())
        children: dict[int, list[int]] = {}
        for i in sorted(chosen):
            children.setdefault(self.candidates[i].parent, []).append(i)
        order: list[int] = []
        stack = [ROOT]
        while stack:
            node = stack.pop()
            if node != ROOT:
                order.append(node)
            stack.extend(sorted(children.get(node, []), key=lambda i: self.candidates[i].score))
        place = {candidate: node for node, candidate in enumerate(order)} | {ROOT: ROOT}
        tokens = [self.candidates[i].token for i in order]
        parents = [place[self.candidates[i].parent] for i in order]
        if self.laws and tokens:
            laws = np.stack(self.laws[: len(tokens)])
            return DraftTree(tokens, parents, source, Selection.SAMPLED, laws), order
        return DraftTree(tokens, parents, source, Selection.DETERMINISTIC if tokens else Selection.ROOT), order
