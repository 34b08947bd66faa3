"""Operations: everything that is done per token and layer, with one meaning and several implementations.

The only package that knows the compiled extension and the Triton kernels. On the CPU activations are float32 and every
operation is row-invariant to the bit: a row's result doesn't depend on the rows beside it.

    from specengine import ops

    y = ops.linear(ops.rms_norm(x, norm_weight, 1e-5), packed)
"""

from specengine.ops.attention import rope_write_kv, tree_attention
from specengine.ops.dispatch import describe, use, use_isa
from specengine.ops.kv import copy_blocks, move_kv
from specengine.ops.linear import linear, linear_add, pack_linear
from specengine.ops.pointwise import rms_norm, silu_mul
from specengine.ops.types import HeadLayout, PackedLinear, RopeTable

__all__ = [
    "HeadLayout",
    "PackedLinear",
    "RopeTable",
    "copy_blocks",
    "describe",
    "linear",
    "linear_add",
    "move_kv",
    "pack_linear",
    "rms_norm",
    "rope_write_kv",
    "silu_mul",
    "tree_attention",
    "use",
    "use_isa",
]
