"""The plain data that operations take: packed weights, head layouts, rotary tables, and the table of operations itself.

Owns shapes and the packing of weights; does not know how any operation is computed.

    packed = PackedLinear(weight, bias)
    packed.panels  # what the CPU kernels read
    packed.weight  # what the reference reads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from specengine.batch import TokenBatch

PANEL = 16  # output columns of a panel: two AVX2 registers of float32
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RopeTable(Protocol):
    """Rotary angles. `cos_sin` is float32 [max_pos, rope_dim]: cosines in the first half, sines in the second."""

    @property
    def cos_sin(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class HeadLayout:
    """How the columns of a fused q, k, v projection split into heads, and the norms of q and k if there are any."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None  # [head_dim]
    norm_eps: float = 1e-6


class PackedLinear:
    """A weight [out, in] in the layout of the implementation that first needs it, and its bias.

    Panels hold 16 output columns: [ceil(out / 16), in, 16], rows of zeros at the end. Within a panel the columns of a
    16-bit weight are interleaved (0, 8, 1, 9, ...), so that one 32-byte load gives columns 0..7 in the low halves of
    eight lanes and 8..15 in the high halves; float32 columns stay in order.

    Only the layout that is asked for is kept, so a weight lies in memory once. Asking for the other one builds it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        if weight.dim() != 2 or weight.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"a linear weight is a float32, bfloat16 or float16 matrix, not {weight.dtype} {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"a bias for {weight.shape[0]} outputs has that length, not {tuple(bias.shape)}")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = None if bias is None else bias.detach().to(torch.float32).contiguous()  # [out]
        self._weight: torch.Tensor | None = weight.detach()  # [out, in]
        self._panels: torch.Tensor | None = None  # [panels, in, 16]

    @property
    def weight(self) -> torch.Tensor:
        """[out, in]. The panels are dropped."""
        if self._weight is None:
            assert self._panels is not None
            self._weight = _unpack(self._panels)[: self.out_features].contiguous()
            self._panels = None
        return self._weight

    @property
    def panels(self) -> torch.Tensor:
        """[ceil(out / 16), in, 16]. The plain weight is dropped (a caller that still holds it keeps it alive)."""
        if self._panels is None:
            assert self._weight is not None
            self._panels = _pack(self._weight)
            self._weight = None
        return self._panels

    def __repr__(self) -> str:
        return f"PackedLinear(out_features={self.out_features}, in_features={self.in_features}, dtype={self.dtype})"


def _pack(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    panels = -(-rows // PANEL)
    padded = weight
    if rows % PANEL:
        padded = torch.cat([weight, weight.new_zeros(panels * PANEL - rows, columns)])
    if weight.dtype == torch.float32:
        return padded.view(panels, PANEL, columns).transpose(1, 2).contiguous()
    halves = padded.view(panels, 2, PANEL // 2, columns)  # half, column within the half
    return halves.permute(0, 3, 2, 1).reshape(panels, columns, PANEL).contiguous()


def _unpack(panels: torch.Tensor) -> torch.Tensor:
    count, columns, _ = panels.shape
    if panels.dtype == torch.float32:
        return panels.transpose(1, 2).reshape(count * PANEL, columns)
    return panels.view(count, columns, PANEL // 2, 2).permute(0, 3, 2, 1).reshape(count * PANEL, columns)


@dataclass(frozen=True, slots=True)
class Operations:
    """One implementation of every operation; see `specengine.ops` for what each promises."""

    name: str
    linear: Callable[[torch.Tensor, PackedLinear], torch.Tensor]
    linear_add: Callable[[torch.Tensor, PackedLinear, torch.Tensor], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    rope_write_kv: Callable[[torch.Tensor, TokenBatch, RopeTable, torch.Tensor, int, HeadLayout], torch.Tensor]
    tree_attention: Callable[[torch.Tensor, torch.Tensor, int, TokenBatch, float, int | None], torch.Tensor]
    move_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
