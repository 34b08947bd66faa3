"""Operations on the paged KV cache of all layers at once: `move_kv`, `copy_blocks`.

Which slots or blocks to copy, and why, is the caller's affair.

    move_kv(kv, torch.tensor([21, 23]), torch.tensor([20, 21]))
"""

from __future__ import annotations

import torch

from specengine.ops.dispatch import ACTIVE


def move_kv(kv: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Copies slots (int64 [n]) of all layers, in order and in place.

    Safe for compaction: a sequence's accepted nodes are listed in ascending order, and node j lies at or after its
    target, so that no copy overwrites the source of a later one.
    """
    (ACTIVE.host if kv.is_cpu else ACTIVE.device).move_kv(kv, source_slots, target_slots)


def copy_blocks(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies whole blocks (ids int64 [n]); every source is read before any target is written. Targets differ."""
    (ACTIVE.host if kv.is_cpu else ACTIVE.device).copy_blocks(kv, sources, targets)
