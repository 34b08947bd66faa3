"""The compiled CPU operations: finds and loads `specengine/_C*.so`, and binds its operators once.

Owns the calling convention of csrc/torch_bindings.cpp. The only module that touches `torch.ops.specengine`.

    table = load()  # raises ExtensionUnavailable
    use_isa("portable")  # tests force an instruction set
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from specengine.batch import TokenBatch
from specengine.ops.types import HeadLayout, Operations, PackedLinear, RopeTable

PACKAGE = Path(__file__).resolve().parent.parent


class ExtensionUnavailable(RuntimeError):
    """The extension wasn't built, or it doesn't load beside the installed torch."""


@cache
def _operators() -> Any:
    """The extension's operators, each bound to its only overload."""
    found = sorted(PACKAGE.glob("_C*.so"))
    if not found:
        raise ExtensionUnavailable("the package was installed without its C++ extension")
    try:
        torch.ops.load_library(found[0])
    except OSError as error:
        raise ExtensionUnavailable(f"{found[0].name} doesn't load: {error}") from error
    names = ("linear", "linear_add", "rms_norm", "silu_mul", "rope_write_kv", "tree_attention", "move_kv", "copy_blocks", "use_isa")
    return SimpleNamespace(**{name: getattr(torch.ops.specengine, name).default for name in names})


def use_isa(name: str) -> str:
    """Asks for (or with "", about) an instruction set. Raises ExtensionUnavailable, or ValueError for what can't be had."""
    chosen: str = _operators().use_isa(name)
    return chosen


def load() -> Operations:
    """The table of compiled operations. Their Python side is bound here, so that a call costs no look-up by name."""
    operators = _operators()
    return Operations(
        name=f"cpu ({operators.use_isa('')})",
        **_bind_dense(operators),
        **_bind_cache(operators),
        move_kv=operators.move_kv,
        copy_blocks=operators.copy_blocks,
    )


def _bind_dense(operators: Any) -> dict[str, Any]:
    linear_op, linear_add_op = operators.linear, operators.linear_add

    def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return linear_op(x, packed.panels, packed.bias, packed.out_features)

    def linear_add(x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor) -> torch.Tensor:
        linear_add_op(x, packed.panels, packed.bias, residual)
        return residual

    return {"linear": linear, "linear_add": linear_add, "rms_norm": operators.rms_norm, "silu_mul": operators.silu_mul}


def _bind_cache(operators: Any) -> dict[str, Any]:
    rope_op, attention_op = operators.rope_write_kv, operators.tree_attention

    def rope_write_kv(
        qkv: torch.Tensor, batch: TokenBatch, rope: RopeTable, kv: torch.Tensor, layer: int, heads: HeadLayout
    ) -> torch.Tensor:
        return rope_op(
            qkv, batch.positions, batch.slot_mapping, rope.cos_sin, kv, layer, heads.num_heads, heads.q_norm, heads.k_norm, heads.norm_eps
        )

    def tree_attention(q: torch.Tensor, kv: torch.Tensor, layer: int, batch: TokenBatch, scale: float, window: int | None) -> torch.Tensor:
        return attention_op(
            q,
            kv,
            layer,
            batch.positions,
            batch.query_start_loc,
            batch.tree_start,
            batch.tree_mask,
            batch.block_tables,
            scale,
            window or 0,
        )

    return {"rope_write_kv": rope_write_kv, "tree_attention": tree_attention}
