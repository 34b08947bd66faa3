"""Matrix products: `pack_linear`, `linear`, `linear_add`.

Owns the choice of layout; knows nothing about models or checkpoints.

    packed = pack_linear(weight, bias)
    y = linear(x, packed)
"""

from __future__ import annotations

import torch

from specengine.ops.dispatch import ACTIVE, REFERENCE
from specengine.ops.types import PackedLinear


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """Lays a weight out for the implementation in use; done once, at load.

    Args:
        weight: [out, in], float32, bfloat16 or float16; kept in its dtype.
        bias: [out] or None; kept as float32.

    Raises:
        ValueError: another dtype or shape.
    """
    packed = PackedLinear(weight, bias)
    if weight.is_cpu and ACTIVE.host is not REFERENCE:
        packed.panels  # noqa: B018  builds the panels and lets go of the plain weight
    return packed


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """x W^T (+ b): x float32 [N, in] contiguous -> float32 [N, out]. Products and sums are float32 whatever the weight's dtype."""
    return (ACTIVE.host if x.is_cpu else ACTIVE.device).linear(x, packed)


def linear_add(x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor) -> torch.Tensor:
    """residual + (x W^T (+ b)), written into `residual` float32 [N, out] contiguous, which is returned."""
    return (ACTIVE.host if x.is_cpu else ACTIVE.device).linear_add(x, packed, residual)
