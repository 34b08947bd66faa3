"""`Law`: the distribution of one next token, after the whole logit pipeline, in the log domain.

Owns sampling from it. Knows nothing about trees or requests.

    law = Law(tokens, scores)
    token = law.next(noise, index=5)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specengine.spec.noise import RequestNoise, Stream, perturbed_top
from specengine.spec.types import Floats, Ints


@dataclass(frozen=True)
class Law:
    """Survivors of the pipeline: ascending `tokens` [n] with `scores` float32 [n], unnormalised; greedy holds one token."""

    tokens: Ints
    scores: Floats

    def next(self, noise: RequestNoise, index: int, stream: Stream = Stream.NEXT) -> int:
        """The token with the largest score + noise: a draw from the law, the same one wherever it is made."""
        if len(self.tokens) == 1:
            return int(self.tokens[0])
        return int(self.tokens[perturbed_top(self.scores, self.tokens, noise, stream, index)[0][0]])

    def logprobs(self, vocab: int) -> Floats:
        """Dense float32 [vocab] log-probabilities; -inf outside the law."""
        dense = np.full(vocab, -np.inf, np.float32)
        dense[self.tokens] = self.scores - log_sum_exp(self.scores)
        return dense


def log_sum_exp(scores: Floats) -> np.float32:
    top = scores.max()
    return np.float32(top + np.log(np.exp(scores - top, dtype=np.float32).sum(dtype=np.float64)))
