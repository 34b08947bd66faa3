"""Paged tree attention by `ops.tree_attention`, on any device.

Owns no arithmetic and plans nothing.

    backend = PagedAttention()
    out = backend.forward(q, kv, layer, backend.plan(batch), scale, None)
"""

from __future__ import annotations

from typing import ClassVar

import torch

from specengine import ops
from specengine.batch import TokenBatch


class PagedAttention:
    """Reads the block tables and the masks of the batch as they are, so planning costs nothing."""

    supports_tree: ClassVar[bool] = True
    supports_graph: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    def plan(self, batch: TokenBatch) -> TokenBatch:
        return batch

    def forward(
        self, q: torch.Tensor, kv: torch.Tensor, layer: int, metadata: TokenBatch, scale: float, window: int | None
    ) -> torch.Tensor:
        """See `ops.tree_attention`."""
        return ops.tree_attention(q, kv, layer, metadata, scale, window)


BACKEND = PagedAttention
