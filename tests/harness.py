"""Runs a model without the engine: a poisoned KV cache, scattered blocks and hand-made batches.

Owns nothing that the engine uses; knows no trees (`tests/kernels` covers their masks).

    harness = Harness(load_folder(fixtures.rand()))
    logits = harness.logits([5, 6, 7, 8], chunks=[3, 1])  # float32 [4, vocab_size]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from specengine.attention.paged import PagedAttention
from specengine.batch import TokenBatch
from specengine.hub import ResolvedModel
from specengine.models.decoder import DecoderModel
from specengine.models.loader import load_model


def resolved(path: Path) -> ResolvedModel:
    return ResolvedModel("gguf" if path.suffix == ".gguf" else "hf", path, path.name)


def load_folder(path: Path, dtype: torch.dtype | None = torch.float32) -> DecoderModel:
    """The model of a folder or GGUF file, without looking anything up."""
    return load_model(resolved(path), dtype)


class Harness:
    """One model with a cache of its own. Slots hold NaN until they are written, and a sequence's blocks lie in reverse order."""

    def __init__(self, model: DecoderModel, *, max_len: int = 512, block_size: int = 16, kv_dtype: torch.dtype = torch.float32):
        self.model, self.block_size = model, block_size
        self.blocks_a_sequence = -(-max_len // block_size)
        self.attention = PagedAttention()
        self._kv_dtype = kv_dtype
        model.prepare(max_len)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], chunks: Sequence[int] | None = None) -> torch.Tensor:
        """float32 [len(token_ids), vocab_size] of one sequence, computed in chunks of these lengths (None: at once)."""
        return self.batch_logits([token_ids], [list(chunks or [len(token_ids)])])[0]

    @torch.inference_mode()
    def batch_logits(self, sequences: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The same for sequences that share their batches: step i holds the i-th chunk of each that still has one."""
        kv = self._empty_kv(len(sequences))
        done = [0] * len(sequences)
        found: list[list[torch.Tensor]] = [[] for _ in sequences]
        for step in range(max(len(lengths) for lengths in chunks)):
            lengths = [each[step] if step < len(each) else 0 for each in chunks]
            batch = self._batch(sequences, done, lengths)
            logits = self.model.logits(self.model.forward(batch, kv, self.attention))
            for index, part in enumerate(logits.split(lengths)):
                found[index].append(part)
                done[index] += lengths[index]
        return [torch.cat(parts) for parts in found]

    def _empty_kv(self, num_sequences: int) -> torch.Tensor:
        c = self.model.config
        shape = (num_sequences * self.blocks_a_sequence, c.num_layers, 2, c.num_kv_heads, self.block_size, c.head_dim)
        return torch.full(shape, float("nan"), dtype=self._kv_dtype)

    def _batch(self, sequences: Sequence[Sequence[int]], done: list[int], lengths: list[int]) -> TokenBatch:
        tables = torch.arange(len(sequences) * self.blocks_a_sequence).flip(0).view(len(sequences), -1)
        positions = [torch.arange(start, start + length) for start, length in zip(done, lengths, strict=True)]
        slots = [table[p // self.block_size] * self.block_size + p % self.block_size for table, p in zip(tables, positions, strict=True)]
        ends = torch.tensor([start + length for start, length in zip(done, lengths, strict=True)], dtype=torch.int32)
        ids = [token for row, start, length in zip(sequences, done, lengths, strict=True) for token in row[start : start + length]]
        return TokenBatch(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.cat(positions).to(torch.int32),
            slot_mapping=torch.cat(slots),
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            seq_lens=ends,
            tree_start=ends.clone(),
            tree_mask=torch.zeros(len(ids), 1, dtype=torch.int64),
            block_tables=tables.to(torch.int32).contiguous(),
            logits_rows=torch.arange(len(ids)),
            max_query_len=max(lengths),
            max_seq_len=int(ends.max()),
        )
