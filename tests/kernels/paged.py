"""Paged sequences for the kernel tests: a cache full of NaN, blocks in random order, rows of chains and trees.

Plain and slow on purpose; the attention oracle is float64 over each row's own path.

    sequence = Sequence(context=20, chain=1, parents=[-1, 0, 0, 2])
    paged = Paged([sequence], shape, torch.bfloat16, generator)
    out = paged.attend(window=None)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from specengine import ops
from specengine.batch import TokenBatch
from specengine.tree import DraftTree


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    num_layers: int = 2

    @property
    def heads(self) -> ops.HeadLayout:
        return ops.HeadLayout(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass
class Sequence:
    """`context` keys in the cache, then `chain` rows, then the tree's rows. `qkv` [keys, width] holds what each key's token projects to."""

    context: int
    chain: int
    parents: list[int] = field(default_factory=list)
    cached_nodes: int = 0  # nodes whose KV an earlier batch has written: they have no rows
    qkv: torch.Tensor | None = None

    @property
    def tree_start(self) -> int:
        return self.context + self.chain

    @property
    def num_keys(self) -> int:
        return self.tree_start + len(self.parents)

    @property
    def keys_with_rows(self) -> list[int]:
        return [*range(self.context, self.tree_start), *range(self.tree_start + self.cached_nodes, self.num_keys)]

    def path(self, key: int) -> list[int]:
        """Keys from position 0 to `key`'s own."""
        if key < self.tree_start:
            return list(range(key + 1))
        tree = DraftTree(list(range(len(self.parents))), self.parents)
        return [*range(self.tree_start), *(self.tree_start + node for node in tree.path(key - self.tree_start))]

    def position(self, key: int) -> int:
        return len(self.path(key)) - 1

    def mask(self, key: int, words: int) -> list[int]:
        bits = sum(1 << (k - self.tree_start) for k in self.path(key) if key >= self.tree_start and k >= self.tree_start)
        return np.array([bits >> 64 * w & 0xFFFFFFFFFFFFFFFF for w in range(words)], np.uint64).view(np.int64).tolist()


def random_tree(size: int, generator: torch.Generator) -> list[int]:
    """Parents of a random tree; -1 is the root."""
    return [int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(size)]


def rope_table(positions: int, dim: int) -> SimpleNamespace:
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return SimpleNamespace(cos_sin=torch.cat([angles.cos(), angles.sin()], 1).to(torch.float32))


class Paged:
    """Sequences in a cache of their own. Unused slots are NaN; the keys without rows are written by the reference."""

    LAYER = 1

    def __init__(self, sequences: list[Sequence], shape: Shape, dtype: torch.dtype, generator: torch.Generator):
        self.sequences, self.shape, self.dtype = sequences, shape, dtype
        size = shape.block_size
        counts = [-(-s.num_keys // size) for s in sequences]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        # Blocks lie further apart than they are long, as in an arena that several models share.
        cells = shape.num_layers * 2 * shape.num_kv_heads * size * shape.head_dim
        memory = torch.full((num_blocks, cells + 24), torch.nan, dtype=dtype)
        self.kv = memory[:, :cells].view(num_blocks, shape.num_layers, 2, shape.num_kv_heads, size, shape.head_dim)
        self.rope = rope_table(max(s.num_keys for s in sequences) + 1, shape.head_dim)
        for s in sequences:
            if s.qkv is None:
                s.qkv = torch.randn(s.num_keys, shape.qkv_width, generator=generator)
        self.batch = self._batch([s.keys_with_rows for s in sequences])
        others = [sorted(set(range(s.num_keys)) - set(s.keys_with_rows)) for s in sequences]
        self._write(others)

    def _slot(self, index: int, key: int) -> int:
        size = self.shape.block_size
        return self.tables[index][key // size] * size + key % size

    def _batch(self, keys: list[list[int]]) -> TokenBatch:
        rows = [(i, key) for i, some in enumerate(keys) for key in some]
        words = max(1, -(-max(len(s.parents) for s in self.sequences) // 64))
        width = max(len(t) for t in self.tables)
        return TokenBatch(
            input_ids=torch.zeros(len(rows), dtype=torch.int64),
            positions=torch.tensor([self.sequences[i].position(key) for i, key in rows], dtype=torch.int32),
            slot_mapping=torch.tensor([self._slot(i, key) for i, key in rows], dtype=torch.int64),
            query_start_loc=torch.tensor([0, *np.cumsum([len(some) for some in keys])], dtype=torch.int32),
            seq_lens=torch.tensor([s.num_keys for s in self.sequences], dtype=torch.int32),
            tree_start=torch.tensor([s.tree_start for s in self.sequences], dtype=torch.int32),
            tree_mask=torch.tensor([self.sequences[i].mask(key, words) for i, key in rows], dtype=torch.int64).view(-1, words),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in self.tables], dtype=torch.int32).view(-1, width),
            logits_rows=torch.zeros(0, dtype=torch.int64),
            max_query_len=max(len(some) for some in keys),
            max_seq_len=max(s.num_keys for s in self.sequences),
        )

    def _projections(self, keys: list[list[int]]) -> torch.Tensor:
        return torch.cat([s.qkv[some] for s, some in zip(self.sequences, keys, strict=True) if s.qkv is not None])

    def _write(self, keys: list[list[int]]) -> torch.Tensor:
        return ops.rope_write_kv(self._projections(keys), self._batch(keys), self.rope, self.kv, self.LAYER, self.shape.heads)

    def attend(self, window: int | None = None) -> torch.Tensor:
        """Writes the rows' KV and attends, by the operations in use: [rows, Hq D]."""
        q = self._write([s.keys_with_rows for s in self.sequences])
        return ops.tree_attention(q, self.kv, self.LAYER, self.batch, self.shape.head_dim**-0.5, window)

    def expected(self, window: int | None = None) -> torch.Tensor:
        """The same in float64, one row at a time over its own path, without a cache."""
        out = []
        for s in self.sequences:
            assert s.qkv is not None
            q, k, v = rotated(s, self.shape, self.rope.cos_sin, self.dtype)
            group = self.shape.num_heads // self.shape.num_kv_heads
            for key in s.keys_with_rows:
                path = s.path(key)
                path = path[max(0, len(path) - window) :] if window else path
                scores = torch.einsum("hd,phd->hp", q[key], k[path].repeat_interleave(group, 1)) * self.shape.head_dim**-0.5
                out.append(torch.einsum("hp,phd->hd", scores.softmax(-1), v[path].repeat_interleave(group, 1)).flatten())
        return torch.stack(out)


def rotated(s: Sequence, shape: Shape, cos_sin: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of all keys in float64, after rotation; k and v rounded as the cache would."""
    assert s.qkv is not None
    by_head = s.qkv.to(torch.float64).view(s.num_keys, -1, shape.head_dim)
    q, k, v = by_head.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    angles = cos_sin[[s.position(key) for key in range(s.num_keys)], None].to(torch.float64)
    cos, sin = angles.split(shape.head_dim // 2, -1)

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x.split(shape.head_dim // 2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return turn(q), turn(k).to(torch.float32).to(dtype).to(torch.float64), v.to(torch.float32).to(dtype).to(torch.float64)
