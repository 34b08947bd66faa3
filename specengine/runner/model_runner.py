"""`ModelRunner`: one model on one device with its KV cache and attention backend. A draft model is a second one.

Does not know that speculation exists: it runs batches.

    output = runner.forward(batch)
    logits = runner.logits(output, batch.logits_rows)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specengine.attention.base import AttentionBackend
from specengine.batch import TokenBatch
from specengine.models.decoder import DecoderModel
from specengine.runner.kv_cache import KVCache


@dataclass(frozen=True)
class ForwardOutput:
    hidden: torch.Tensor  # float32 [N, hidden_size], before the final norm
    taps: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> hidden states asked for by a drafter


class ModelRunner:
    def __init__(self, model: DecoderModel, kv_cache: KVCache, attention: AttentionBackend):
        self.model = model
        self.kv_cache = kv_cache
        self.attention = attention

    @torch.inference_mode()
    def forward(self, batch: TokenBatch) -> ForwardOutput:
        """Writes K and V of every row into its slot and returns the hidden states of all rows."""
        return ForwardOutput(self.model.forward(batch, self.kv_cache.tensor, self.attention))

    @torch.inference_mode()
    def logits(self, output: ForwardOutput, rows: torch.Tensor) -> torch.Tensor:
        """Logits float32 [L, vocab_size] of the given rows (int64 [L])."""
        return self.model.logits(output.hidden.index_select(0, rows))
