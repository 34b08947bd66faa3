"""`AttentionBackend`: what a model asks of attention.

Owns the interface alone. A backend prepares a batch once (`plan`) and then serves each layer (`forward`).

    metadata = backend.plan(batch)
    out = backend.forward(q, kv, layer, metadata, scale, None)
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch

from specengine.batch import TokenBatch


class AttentionBackend(Protocol):
    """Capabilities as data, two methods. `metadata` is whatever the backend's own `plan` returns."""

    supports_tree: ClassVar[bool]  # rows with a tree mask; False caps a tree's width at 1
    supports_graph: ClassVar[bool]  # `forward` may be captured in a device graph
    dtypes: ClassVar[tuple[torch.dtype, ...]]  # of the KV cache

    def plan(self, batch: TokenBatch) -> Any:
        """Prepares a batch; called once a forward pass, before the first layer."""
        ...

    def forward(self, q: torch.Tensor, kv: torch.Tensor, layer: int, metadata: Any, scale: float, window: int | None) -> torch.Tensor:
        """q float32 [N, Hq, D] -> float32 [N, Hq D]; `kv` already holds the batch's rows. See `ops.tree_attention`."""
        ...
