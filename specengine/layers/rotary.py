"""Rotary position tables: default, linear, dynamic (NTK), yarn and llama3 scaling.

Owns the angles; the rotation itself is an operation. The same arithmetic as transformers', in float32. Knows nothing
about models' files.

    rope = RopeParameters(theta=10000.0, dim=64, max_position_embeddings=8192)
    table = rope_table(rope, max_len=8192)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from specengine.errors import LoadError


@dataclass(frozen=True)
class RopeParameters:
    """`kind` is one of `KINDS`; `scaling` holds that kind's own keys as config.json has them."""

    theta: float
    dim: int  # rotated dimensions of a head
    max_position_embeddings: int
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict)
    freq_factors: tuple[float, ...] | None = None  # GGUF's rope_freqs: a divisor for each frequency


@dataclass(frozen=True)
class RopeTable:
    cos_sin: torch.Tensor  # float32 [max_len, dim]: cosines of dim / 2 angles, then their sines


def rope_table(rope: RopeParameters, max_len: int) -> RopeTable:
    """Angles of positions 0 to max_len - 1, times the kind's attention factor."""
    frequencies, factor = KINDS[rope.kind](rope, max_len)
    if rope.freq_factors is not None:
        frequencies = frequencies / torch.tensor(rope.freq_factors, dtype=torch.float32)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None]
    return RopeTable(torch.cat([angles.cos() * factor, angles.sin() * factor], dim=1).contiguous())


def _inverse_frequencies(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim))


def _default(rope: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    return _inverse_frequencies(rope.theta, rope.dim), 1.0


def _linear(rope: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    return _inverse_frequencies(rope.theta, rope.dim) / _number(rope, "factor"), 1.0


def _dynamic(rope: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """NTK-aware base for the engine's longest sequence.

    transformers changes the base as a sequence grows, so that a token's key depends on the length it was computed at;
    that contradicts chunked prefill and a prefix cache. Here the base follows --max-model-len once, and equals
    transformers' where that is at most the model's own length.
    """
    factor, original = _number(rope, "factor"), rope.max_position_embeddings
    length = max(max_len, original)
    base = rope.theta * ((factor * length / original) - (factor - 1)) ** (rope.dim / (rope.dim - 2))
    return _inverse_frequencies(base, rope.dim), 1.0


def _yarn(rope: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2309.00071): low frequencies interpolated, high ones kept, a ramp between."""
    scaling, dim = rope.scaling, rope.dim
    original = scaling.get("original_max_position_embeddings") or rope.max_position_embeddings
    factor = scaling.get("factor") or rope.max_position_embeddings / original
    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = (
            yarn_attention(factor, mscale) / yarn_attention(factor, mscale_all) if mscale and mscale_all else yarn_attention(factor, 1.0)
        )

    def correction(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = correction(scaling.get("beta_fast") or 32), correction(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001), 0, 1)
    kept = 1 - ramp
    powers = rope.theta ** (torch.arange(0, dim, 2).to(torch.float32) / dim)
    return (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept, float(attention)


def yarn_attention(factor: float, mscale: float) -> float:
    """The paper's scale of the angles' sines and cosines: sqrt(1/t) = 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth step between."""
    plain = _inverse_frequencies(rope.theta, rope.dim)
    factor, low, high = _number(rope, "factor"), _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    original = rope.scaling.get("original_max_position_embeddings") or rope.max_position_embeddings
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, plain)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, scaled), 1.0


def _number(rope: RopeParameters, name: str) -> float:
    value = rope.scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LoadError(f"rope type {rope.kind!r} needs the number {name!r}, which is {value!r}")
    return float(value)


# Keys of `scaling` that are numbers where they are there at all.
ROPE_NUMBERS = (
    "factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
    "low_freq_factor", "high_freq_factor",
)  # fmt: skip
KINDS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3}
