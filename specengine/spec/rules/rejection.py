"""`rejection`: token-level speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

For a chain whose tokens x were drawn from known laws q: accept x with probability min(1, p(x) / q(x)); after the first
rejection draw from norm(max(p - q, 0)); if all were accepted, draw from p. Lossless in law. Coins, residual draw and
bonus come from streams that the draft never used: noise reused for the residual is biased.
"""

from __future__ import annotations

import numpy as np

from specengine.spec.law import Law
from specengine.spec.noise import RequestNoise, Stream
from specengine.spec.rule import ROOT, Decision, LawAt
from specengine.spec.types import Floats
from specengine.tree import DraftTree


class Rejection:
    name = "rejection"

    def decide(self, tree: DraftTree, law_at: LawAt, noise: RequestNoise, index: int) -> Decision:
        if not tree.is_chain or tree.draft_logprobs is None:
            raise ValueError("rejection needs a chain that carries the law of each token")
        node = ROOT
        for depth, token in enumerate(tree.tokens):
            law = law_at(node)
            q = tree.draft_logprobs[depth]
            p = law.logprobs(len(q))
            coin = noise.uniform(Stream.ACCEPT, index + depth)
            if not np.log(coin) < p[token] - q[token]:
                return Decision(list(range(depth)), residual(p, q).next(noise, index + depth, Stream.RESIDUAL))
            node = depth
        return Decision(list(range(len(tree))), law_at(node).next(noise, index + len(tree)))


def residual(p: Floats, q: Floats) -> Law:
    """norm(max(p - q, 0)) of dense log-probabilities; p itself where rounding leaves nothing (p equals q)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        left = np.where(q < p, p + np.log1p(-np.exp(q - p, dtype=np.float64)), -np.inf)
    if not (left > -np.inf).any():
        left = p
    tokens = np.flatnonzero(left > -np.inf)
    return Law(tokens, left[tokens].astype(np.float32))


RULE = Rejection()
