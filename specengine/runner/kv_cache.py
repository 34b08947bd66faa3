"""`KVCache`: one model's keys and values over shared block ids, and the arena that holds all models' caches.

Owns memory only: which block belongs to whom is `core`'s affair. KV is block-major (all layers of a block together);
the target's blocks lie at the bottom of a device's arena and a draft's at the top, so that a draft that is dropped
leaves one region behind.

    arena = KVArena(num_blocks=256, shapes=[target_shape, draft_shape])
    target_kv, draft_kv = arena.caches
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import ops


@dataclass(frozen=True)
class KVShape:
    """Dimensions of one model's KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        element = torch.empty((), dtype=self.dtype).element_size()
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * element


class KVCache:
    """K and V of one model, `tensor` [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self.block_size = tensor.shape[4]

    def move(self, source_slots: list[int], target_slots: list[int]) -> None:
        """Copies slots of all layers; in place, in order, safe where each source is at or after its target."""
        if source_slots:
            device = self.tensor.device
            ops.move_kv(self.tensor, torch.tensor(source_slots, device=device), torch.tensor(target_slots, device=device))

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole blocks; every source is read before any target is written."""
        if copies:
            pairs = torch.tensor(copies, dtype=torch.int64, device=self.tensor.device)
            ops.copy_blocks(self.tensor, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


class KVArena:
    """One allocation a device; the first cache (the target's) lies at the bottom, the others follow from the top down."""

    def __init__(self, num_blocks: int, shapes: list[KVShape], device: torch.device):
        sizes = [num_blocks * shape.bytes_per_block for shape in shapes]
        # Zeroed lazily by the operating system: pages are touched when first written.
        self.memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self.caches: list[KVCache] = []
        top = sum(sizes)
        for index, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
            begin = 0 if index == 0 else top - size
            top = top if index == 0 else begin
            region = self.memory[begin : begin + size].view(shape.dtype)
            view = region.view(num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
            self.caches.append(KVCache(view))
