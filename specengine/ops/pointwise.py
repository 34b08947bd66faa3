"""Operations within a row: `rms_norm`, `silu_mul`.

Rows know nothing of each other here.

    y = rms_norm(x, weight, 1e-5)
"""

from __future__ import annotations

import torch

from specengine.ops.dispatch import ACTIVE


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: x float32 [N, H] contiguous, weight [H] of any float dtype -> float32 [N, H]."""
    return (ACTIVE.host if x.is_cpu else ACTIVE.device).rms_norm(x, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: float32 [N, 2 I] contiguous, gate first -> float32 [N, I]."""
    return (ACTIVE.host if gate_up.is_cpu else ACTIVE.device).silu_mul(gate_up)
