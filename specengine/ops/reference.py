"""Reference operations in plain torch: the oracle of every faster implementation, and the fallback without one.

Owns the meaning of each operation. Row-invariant to the bit: a row's result doesn't depend on the number of rows, its
neighbours or the chunking. Matrix products therefore run in one shape (16 zero-padded rows), sums in one order, and
exp by a polynomial of elementwise steps (a library's exp may round its vector body and its tail differently).
Does not know devices or dispatch.

    y = linear(x, PackedLinear(weight))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specengine.batch import TokenBatch
from specengine.ops.types import HeadLayout, PackedLinear, RopeTable

ROWS = 16  # rows of every matrix product
TILE = 16  # keys of an attention tile, aligned to absolute logical position
UPCAST_ELEMENTS = 1 << 24  # weight elements that are held as float32 at a time: 64 MiB
LOG2E = 1.4426950408889634
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
# (exp(r) - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2], fitted for the least relative error of exp (3e-9): lowest power first.
EXP_COEFFICIENTS = (0.49999994, 0.16666521, 0.041668389, 0.0083687454, 0.0013814539)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x in float32, the same bits wherever an element lies; 0 below -87.3, no more than 1.65e38; NaN stays NaN."""
    clamped = x.clamp(-88.0, 88.0)
    n = torch.round(clamped * LOG2E)
    r = (clamped - n * LN2_HIGH) - n * LN2_LOW
    q = torch.full_like(r, EXP_COEFFICIENTS[-1])
    for coefficient in reversed(EXP_COEFFICIENTS[:-1]):
        q = q * r + coefficient
    p = q * (r * r) + r + 1.0
    power = ((torch.nan_to_num(n).to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < -87.3, torch.zeros_like(x), p * power)


def sum_last(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension in one order: zero-padded to a power of two, then halves are added to each other."""
    width = 1 << max(0, x.shape[-1] - 1).bit_length()
    x = F.pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """x W^T (+ b) in float32: x [N, in] -> [N, out]. 16-bit weights are widened piece by piece."""
    tiles = F.pad(x.to(torch.float32), (0, 0, 0, -x.shape[0] % ROWS)).split(ROWS)
    out = x.new_empty(len(tiles) * ROWS, packed.out_features, dtype=torch.float32)
    step = max(ROWS, UPCAST_ELEMENTS // packed.in_features)
    for begin in range(0, packed.out_features, step):
        weight = packed.weight[begin : begin + step].to(torch.float32)
        for i, tile in enumerate(tiles):
            out[i * ROWS : (i + 1) * ROWS, begin : begin + step] = F.linear(tile, weight)
    if packed.bias is not None:
        out += packed.bias
    return out[: x.shape[0]]


def linear_add(x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor) -> torch.Tensor:
    """residual + x W^T (+ b), in place."""
    return residual.add_(linear(x, packed))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (Zhang and Sennrich, 1910.07467)."""
    scale = 1.0 / torch.sqrt(sum_last(x * x) / x.shape[-1] + eps)
    return x * scale * weight.to(torch.float32)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [N, 2 I] -> [N, I], the gate in the first half (SwiGLU, 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1.0 + exp(-gate)) * up


def rope_write_kv(qkv: torch.Tensor, batch: TokenBatch, rope: RopeTable, kv: torch.Tensor, layer: int, heads: HeadLayout) -> torch.Tensor:
    """Norms (if any) and rotates q and k, writes k and v at the rows' slots, returns q float32 [N, Hq, D]."""
    by_head = qkv.view(qkv.shape[0], -1, heads.head_dim)
    q, k, v = by_head.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    q = q if heads.q_norm is None else rms_norm(q, heads.q_norm, heads.norm_eps)
    k = k if heads.k_norm is None else rms_norm(k, heads.k_norm, heads.norm_eps)
    angles = rope.cos_sin[batch.positions.to(torch.int64), None]  # [N, 1, rope_dim]
    block, offset = batch.slot_mapping // kv.shape[4], batch.slot_mapping % kv.shape[4]
    kv[:, layer, 0][block, :, offset] = _rotate(k, angles).to(kv.dtype)
    kv[:, layer, 1][block, :, offset] = v.to(kv.dtype)
    return _rotate(q, angles).contiguous()


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates dimension i against i + rope_dim / 2 (as HF's `rotate_half`); dimensions past rope_dim stay."""
    half = angles.shape[-1] // 2
    cos, sin = angles.split(half, dim=-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def tree_attention(q: torch.Tensor, kv: torch.Tensor, layer: int, batch: TokenBatch, scale: float, window: int | None) -> torch.Tensor:
    """Attention of each row over its own path, by logical position: q [N, Hq, D] -> [N, Hq D]. See `TokenBatch`."""
    out = torch.zeros_like(q)
    bounds = batch.query_start_loc.tolist()
    for r, tree_start in enumerate(batch.tree_start.tolist()):
        chain = [row for row in range(bounds[r], bounds[r + 1]) if not batch.tree_mask[row].any()]
        nodes = [row for row in range(bounds[r], bounds[r + 1]) if batch.tree_mask[row].any()]
        groups = [chain[i : i + ROWS] for i in range(0, len(chain), ROWS)] + [[row] for row in nodes]
        for rows in groups:
            keys = _path(batch.tree_mask[rows[0]], tree_start, int(batch.positions[rows].max()))
            block = batch.block_tables[r, keys // kv.shape[4]].to(torch.int64)
            out[rows] = _attend(q[rows], kv[:, layer], block * kv.shape[4] + keys % kv.shape[4], batch.positions[rows], scale, window)
    return out.flatten(1)


def _path(mask: torch.Tensor, tree_start: int, last: int) -> torch.Tensor:
    """Keys int64 [last + 1] of a row by logical position: the context, then its ancestors-or-self in order of depth."""
    words = [word & 0xFFFFFFFFFFFFFFFF for word in mask.tolist()]
    nodes = [64 * w + b for w, word in enumerate(words) for b in range(64) if word >> b & 1]
    return torch.tensor([*range(min(tree_start, last + 1)), *(tree_start + node for node in nodes)], dtype=torch.int64, device=mask.device)


def _attend(  # noqa: PLR0913
    q: torch.Tensor, layer_kv: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Two-pass softmax of up to 16 rows over one path; q [n, Hq, D], slots int64 [length] -> [n, Hq, D]."""
    count, num_heads, dim = q.shape
    num_kv_heads, block_size = layer_kv.shape[2], layer_kv.shape[3]
    tiles = -(-len(slots) // TILE)
    first = 0 if window is None else max(0, int(positions.min()) - window + 1)  # keys before it are seen by no row
    key = torch.arange(tiles * TILE, device=q.device)
    seen = key[None] <= positions[:, None]
    if window is not None:
        seen &= key[None] > positions[:, None] - window

    # Places that no row sees are zero and never read: their slots may hold anything.
    gathered = q.new_zeros(2, tiles * TILE, num_kv_heads, dim)
    block, offset = slots[first:] // block_size, slots[first:] % block_size
    gathered[:, first : len(slots)] = layer_kv[block, :, :, offset].transpose(0, 1).to(torch.float32)
    keys, values = gathered.view(2, tiles, TILE, num_kv_heads, dim).transpose(2, 3)  # [tiles, Hkv, 16, D]

    packed = F.pad(q, (0, 0, 0, 0, 0, ROWS - count)).view(ROWS, num_kv_heads, -1, dim).transpose(0, 1).reshape(num_kv_heads, -1, dim)
    scores = torch.matmul(packed[None], keys.transpose(-1, -2)) * scale  # [tiles, Hkv, 16 G, 16]
    hidden = ~F.pad(seen, (0, 0, 0, ROWS - count), value=True).view(ROWS, 1, tiles, TILE).expand(-1, num_heads // num_kv_heads, -1, -1)
    hidden = hidden.reshape(-1, tiles, TILE).transpose(0, 1)[:, None]  # [tiles, 1, 16 G, 16]
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = exp(scores - scores.amax((0, 3), keepdim=True)).masked_fill(hidden, 0.0)
    sums = sum_last(weights)  # [tiles, Hkv, 16 G, 1]
    parts = torch.matmul(weights, values)  # [tiles, Hkv, 16 G, D]
    total, out = sums[0], parts[0]
    for i in range(1, tiles):  # tile by tile, so that more tiles of zeros change nothing
        total, out = total + sums[i], out + parts[i]
    return (out / total).view(num_kv_heads, ROWS, -1, dim).transpose(0, 1).reshape(ROWS, num_heads, dim)[:count]


def move_kv(kv: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Copies slots (int64 [n]) of all layers. Every source is at or after its target and before later targets' sources."""
    size = kv.shape[4]
    kept = kv[source_slots // size, :, :, :, source_slots % size]  # [n, layers, 2, Hkv, D]
    kv[target_slots // size, :, :, :, target_slots % size] = kept


def copy_blocks(kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies whole blocks (int64 [n]); every source is read before any target is written."""
    kv[targets] = kv[sources]
