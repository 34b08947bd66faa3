"""How likely a same-noise child is to be accepted, from how far its perturbed score lies from its best rival's.

Owns a logistic model c = sigmoid(weight * gap + bias[rank]), fitted online by what was accepted (decision: scores for
growing and cutting trees). Reading the drafted token is legal here because `match` is exact for any pruning.

    log_chances = model.log_chance(gaps)
    model.learn(rank, gap, accepted=True)
"""

from __future__ import annotations

import math

START_WEIGHT = 0.7
START_BIAS = (0.0, -0.5, -1.0, -1.5)
RATE = 0.02
LARGEST_GAP = 20.0


class CouplingModel:
    def __init__(self) -> None:
        self.weight = START_WEIGHT
        self.bias = list(START_BIAS)

    def log_chance(self, gaps: list[float]) -> list[float]:
        """log c of children in order of rank, made non-increasing so that a better child never scores lower."""
        chances: list[float] = []
        for rank, gap in enumerate(gaps):
            value = -math.log1p(math.exp(-self._logit(rank, gap)))
            chances.append(min(value, chances[-1]) if chances else value)
        return chances

    def learn(self, rank: int, gap: float, *, accepted: bool) -> None:
        """One gradient step of logistic regression."""
        error = float(accepted) - 1.0 / (1.0 + math.exp(-self._logit(rank, gap)))
        self.weight = min(3.0, max(0.05, self.weight + RATE * error * _clamped(gap)))
        self.bias[min(rank, len(self.bias) - 1)] += RATE * error

    def _logit(self, rank: int, gap: float) -> float:
        return self.weight * _clamped(gap) + self.bias[min(rank, len(self.bias) - 1)]


def _clamped(gap: float) -> float:
    return max(-LARGEST_GAP, min(LARGEST_GAP, gap))


def gaps_of(perturbed: list[float]) -> list[float]:
    """Of scores best first: the best child's lead over the second, and the others' (negative) distance from the best."""
    if len(perturbed) == 1:
        return [LARGEST_GAP]
    return [perturbed[0] - perturbed[1]] + [score - perturbed[0] for score in perturbed[1:]]
