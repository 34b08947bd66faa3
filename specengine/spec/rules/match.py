"""`match`: the target draws its own token at each node; a child is accepted if it is that token.

Exact for any draft, tree and pruning, because the draw never looks at the draft. With noise keyed by position the text
is that of plain sampling with the same seed, token for token; greedy is the case without noise. Same noise in the draft
is what makes matches likely (Gumbel coupling: Daliri, Musco, Suresh 2024).
"""

from __future__ import annotations

from specengine.spec.noise import RequestNoise
from specengine.spec.rule import ROOT, Decision, LawAt
from specengine.tree import DraftTree


class Match:
    name = "match"

    def decide(self, tree: DraftTree, law_at: LawAt, noise: RequestNoise, index: int) -> Decision:
        children = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        node, path = ROOT, list[int]()
        while True:
            token = law_at(node).next(noise, index + len(path))
            child = children.get((node, token))
            if child is None:
                return Decision(path, token)
            path.append(child)
            node = child


RULE = Match()
