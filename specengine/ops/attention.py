"""Operations between rows and the paged KV cache of one layer: `rope_write_kv`, `tree_attention`.

`kv` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] in float32, bfloat16 or float16, contiguous but for
its first dimension; slot s is offset s % block_size of block s // block_size.

    q = rope_write_kv(qkv, batch, rope, kv, layer, heads)
    out = tree_attention(q, kv, layer, batch, scale, None)
"""

from __future__ import annotations

import torch

from specengine.batch import TokenBatch
from specengine.ops.dispatch import ACTIVE
from specengine.ops.types import HeadLayout, RopeTable


def rope_write_kv(qkv: torch.Tensor, batch: TokenBatch, rope: RopeTable, kv: torch.Tensor, layer: int, heads: HeadLayout) -> torch.Tensor:
    """Splits, norms, rotates and stores: after it `kv` holds the rows' keys and values.

    Args:
        qkv: float32 [N, (Hq + 2 Hkv) D] contiguous; q, k, v by head.
        batch: `positions` give the angles, `slot_mapping` the places.
        rope: `cos_sin` float32 [max_pos, rope_dim]; dimension i turns against i + rope_dim / 2 (as HF's Llama).
        kv: written at `layer`; k after norm and rotation, v as it is, both rounded to the cache's dtype.
        layer: index into the cache's second dimension.
        heads: head counts, and weights of the per-head RMS norms of q and k (before the rotation) if the model has them.

    Returns:
        q float32 [N, Hq, D], normed and rotated.
    """
    return (ACTIVE.host if qkv.is_cpu else ACTIVE.device).rope_write_kv(qkv, batch, rope, kv, layer, heads)


def tree_attention(q: torch.Tensor, kv: torch.Tensor, layer: int, batch: TokenBatch, scale: float, window: int | None) -> torch.Tensor:
    """Softmax attention of every row over its own path, reduced by logical position in tiles of 16 keys.

    A chain row at position p sees slots 0..p of its sequence; a node row sees slots below `tree_start` and its
    ancestors-or-self. Slots that no row sees are never read. So a node's output has the bits of the same path decoded
    plainly, whatever slots it lies in.

    Args:
        q: float32 [N, Hq, D] contiguous; Hq is a multiple of the cache's heads.
        kv: the cache, already holding the rows of this batch.
        layer: index into the cache's second dimension.
        batch: rows, masks and block tables; sequences without rows are legal.
        scale: factor of the scores, usually D^-1/2.
        window: how many keys a row sees at most, itself included (sliding window by logical position); None for all.

    Returns:
        float32 [N, Hq D].
    """
    return (ACTIVE.host if q.is_cpu else ACTIVE.device).tree_attention(q, kv, layer, batch, scale, window)
