"""Counter-based noise: the same number for the same (seed, choice, output index, stream, token), on any device.

Owns the definition, to the bit: Philox4x32-10 (Salmon et al., SC11) with the request's 64-bit seed as the key and
(token >> 2, output index, choice, stream) as the counter; lane token & 3. A uniform is

    v = min((float32(bits) + 0.5) * 2^-32, 1 - 2^-24)                and Gumbel noise is    g = -log(-log1p(-v))

in float32, with `log32` below: correctly rounded multiplications, additions and divisions in the order written, none
fused, so that C++ and Triton can give the same bits. Noise depends on sequence and depth, never on a tree's node.

    noise = RequestNoise(seed=7, choice=0)
    noise.gumbel(Stream.NEXT, index=3, tokens=np.arange(100))
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from specengine.spec.types import Floats, Ints

LARGEST_UNIFORM = np.float32(1 - 2.0**-24)
MASK = np.uint64(0xFFFF_FFFF)
SHIFT = np.uint64(32)
MULTIPLIERS = (np.uint64(0xD251_1F53), np.uint64(0xCD9E_8D57))
WEYL = (0x9E37_79B9, 0xBB67_AE85)
# log(1 + x) = x - x^2 / 2 + x^3 P(x) on [sqrt(1/2) - 1, sqrt(2) - 1], highest power first (Cephes' logf).
LOG_COEFFICIENTS = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)


class Stream(IntEnum):
    NEXT = 0  # the token itself: shared by target and draft
    ACCEPT = 1  # coins of rejection rules
    RESIDUAL = 2  # the draw after a rejection
    DRAFT = 3  # what a draft samples for rules that know its law


def philox(counter: tuple[Ints, Ints, Ints, Ints], seed: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Four 32-bit lanes (as uint64 arrays) of Philox4x32-10; counters broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFF_FFFF, seed >> 32 & 0xFFFF_FFFF
    for _ in range(10):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> SHIFT) ^ c1 ^ np.uint64(k0), right & MASK, (left >> SHIFT) ^ c3 ^ np.uint64(k1), left & MASK
        k0, k1 = k0 + WEYL[0] & 0xFFFF_FFFF, k1 + WEYL[1] & 0xFFFF_FFFF
    return c0, c1, c2, c3


def log32(x: Floats) -> Floats:
    """Natural logarithm of positive normal float32 numbers, by one fixed sequence of float32 operations."""
    bits = x.view(np.int32)
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x007F_FFFF) | 0x3F00_0000).view(np.float32)  # [0.5, 1)
    low = mantissa < np.float32(0.70710677)
    exponent = (exponent - low).astype(np.float32)
    r = np.where(low, mantissa + mantissa, mantissa) - np.float32(1)
    square = r * r
    p = np.full_like(r, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        p = p * r + np.float32(coefficient)
    y = p * r * square
    y = y + exponent * LN2_LOW
    y = y - np.float32(0.5) * square
    result: Floats = (r + y) + exponent * LN2_HIGH
    return result


def uniform_from_bits(bits: Ints) -> Floats:
    """v in (0, 1) of 32-bit integers, float32."""
    v = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    bounded: Floats = np.minimum(v, LARGEST_UNIFORM)
    return bounded


def gumbel_from_bits(bits: Ints) -> Floats:
    """g = -log(-log1p(-v)), float32; log1p by Kahan's correction, which keeps small v exact."""
    v = uniform_from_bits(bits)
    u = np.float32(1) - v
    shift = u - np.float32(1)
    exact = shift == 0
    log1p = np.where(exact, -v, log32(u) * (-v / np.where(exact, np.float32(1), shift)))
    return -log32(-log1p)


LARGEST_GUMBEL = gumbel_from_bits(np.zeros(1, np.uint64))[0]  # no noise exceeds that of the smallest v


@dataclass(frozen=True)
class RequestNoise:
    """The noise of one choice of one request."""

    seed: int
    choice: int = 0

    def gumbel(self, stream: Stream, index: int, tokens: Ints) -> Floats:
        """float32 noise of the given tokens (target's ids) at output index `index`."""
        return gumbel_from_bits(self._bits(stream, index, tokens))

    def uniform(self, stream: Stream, index: int) -> float:
        return float(uniform_from_bits(self._bits(stream, index, np.zeros(1, np.int64)))[0])

    def _bits(self, stream: Stream, index: int, tokens: Ints) -> Ints:
        tokens = np.asarray(tokens)
        place = tokens.astype(np.uint64)
        rest: tuple[Any, Any, Any] = (np.uint64(index), np.uint64(self.choice), np.uint64(int(stream)))
        count = len(tokens)
        if count and count % 4 == 0 and tokens[0] % 4 == 0 and tokens[-1] - tokens[0] == count - 1:  # a whole range: four tokens a counter
            lanes = philox((place[::4] >> np.uint64(2), *rest), self.seed)
            return np.stack(lanes, axis=1).reshape(-1)
        lanes = philox((place >> np.uint64(2), *rest), self.seed)
        return np.choose((tokens & 3).astype(np.int64), lanes)


def perturbed_top(scores: Floats, tokens: Ints, noise: RequestNoise, stream: Stream, index: int, count: int = 1) -> tuple[Ints, Floats]:
    """The `count` largest of score + noise: positions into `tokens`, and perturbed scores, best first; lowest id on ties.

    `scores` float32 [n] of ascending `tokens` [n]. Noise is drawn for those tokens alone that can still win: no noise
    exceeds `LARGEST_GUMBEL`, and rounding is monotone, so the result is that of drawing it for all.
    """
    chosen: Ints = np.arange(len(scores))
    first = min(len(scores), max(32, 4 * count))
    if len(scores) > 4 * first:
        likely = np.argpartition(scores, len(scores) - first)[-first:]
        reached = np.sort(scores[likely] + noise.gumbel(stream, index, tokens[likely]))[-count]
        able = np.flatnonzero(scores + LARGEST_GUMBEL >= reached)
        if 4 * len(able) < len(scores):  # a whole range shares each counter among four tokens: beyond this it is cheaper
            chosen = able
    perturbed = scores[chosen] + noise.gumbel(stream, index, tokens[chosen])
    order = np.argsort(-perturbed, kind="stable")[:count]
    return chosen[order], perturbed[order]
