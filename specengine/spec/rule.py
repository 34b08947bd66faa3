"""What a rule of acceptance gets and gives; owns the types alone.

decision = rule.decide(tree, law_at, noise, index)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from specengine.spec.law import Law
from specengine.spec.noise import RequestNoise
from specengine.tree import DraftTree

ROOT = -1
# The target's law after a node (ROOT: after the last committed token).
LawAt = Callable[[int], Law]


class Decision(NamedTuple):
    path: list[int]  # accepted nodes, from the root's child down
    next_token: int  # the one token of the target: where the path ends


class Rule(Protocol):
    name: str

    def decide(self, tree: DraftTree, law_at: LawAt, noise: RequestNoise, index: int) -> Decision:
        """`index` is the output index of the tree's first level. Laws are asked for visited nodes only."""
        ...
