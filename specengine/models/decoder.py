"""`DecoderModel`: one decoder for all families, over packed weights and operations.

Owns the forward pass of a batch: embedding, layers, final norm and head. Knows nothing about files, sequences or
speculation. Activations between operations are float32 on the CPU.

    model.prepare(max_len=4096)
    hidden = model.forward(batch, kv, attention)
    logits = model.logits(hidden[batch.logits_rows])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import ops
from specengine.attention.base import AttentionBackend
from specengine.batch import TokenBatch
from specengine.layers.rotary import RopeTable, rope_table
from specengine.models.families import DecoderConfig


@dataclass(frozen=True)
class LayerWeights:
    """One layer. q, k and v are one matrix, and so are gate and up: fewer, larger products."""

    input_norm: torch.Tensor  # float32 [hidden]
    qkv: ops.PackedLinear  # [(Hq + 2 Hkv) D, hidden]
    output: ops.PackedLinear  # [hidden, Hq D]
    post_norm: torch.Tensor  # float32 [hidden]
    gate_up: ops.PackedLinear  # [2 intermediate, hidden]
    down: ops.PackedLinear  # [hidden, intermediate]
    heads: ops.HeadLayout
    window: int | None


@dataclass(frozen=True)
class DecoderWeights:
    embedding: torch.Tensor  # [vocab, hidden], in the checkpoint's dtype
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # float32 [hidden]
    head: ops.PackedLinear  # [vocab, hidden]


class DecoderModel:
    def __init__(self, config: DecoderConfig, weights: DecoderWeights, dtype: torch.dtype):
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.scale = config.head_dim**-0.5
        self._rope: RopeTable | None = None

    @property
    def num_parameters(self) -> int:
        """Weights read for one token: embeddings count once, as the head."""
        total = self.weights.head.out_features * self.weights.head.in_features
        for layer in self.weights.layers:
            total += sum(p.out_features * p.in_features for p in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return total

    def prepare(self, max_len: int) -> None:
        """Makes the rotary table for positions 0 to max_len - 1."""
        self._rope = rope_table(self.config.rope, max_len)

    def forward(self, batch: TokenBatch, kv: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Writes the batch's K and V into `kv` and returns hidden states float32 [N, hidden] before the final norm."""
        rope, eps, scale = self._rope, self.config.rms_norm_eps, self.scale
        assert rope is not None, "prepare() comes first"
        metadata = attention.plan(batch)
        hidden = self.weights.embedding.index_select(0, batch.input_ids).to(torch.float32)
        for index, layer in enumerate(self.weights.layers):
            qkv = ops.linear(ops.rms_norm(hidden, layer.input_norm, eps), layer.qkv)
            q = ops.rope_write_kv(qkv, batch, rope, kv, index, layer.heads)
            attended = attention.forward(q, kv, index, metadata, scale, layer.window)
            ops.linear_add(attended, layer.output, hidden)
            gate_up = ops.linear(ops.rms_norm(hidden, layer.post_norm, eps), layer.gate_up)
            ops.linear_add(ops.silu_mul(gate_up), layer.down, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 [L, vocab] of hidden states float32 [L, hidden]; L is 0 in a step of prompt chunks alone."""
        if not len(hidden):
            return hidden.new_empty(0, self.config.vocab_size)
        return ops.linear(ops.rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps), self.weights.head)
