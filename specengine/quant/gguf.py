"""GGUF tensor encodings, decoded as whole arrays.

Owns the block layouts of ggml (its `ggml-quants.h` is the format's definition): F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1,
Q8_0, Q4_K, Q5_K, Q6_K. Knows nothing about files or models.

    values = decode(raw_bytes, "Q4_1", shape=(576, 1536))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specengine.errors import LoadError

SUPER = 256  # values of a K-quant block
GROUP = 32  # values of a plain block, and of a K-quant's scale

Array = np.ndarray


@dataclass(frozen=True)
class Encoding:
    name: str
    block_values: int
    block_bytes: int
    decode: Callable[[Array], Array]  # uint8 [blocks, block_bytes] -> float32 [blocks, block_values]


def decode(raw: Array, encoding: Encoding, shape: tuple[int, ...]) -> Array:
    """float32 array of `shape` out of its bytes (uint8, flat). Raises LoadError where the size is wrong."""
    count = int(np.prod(shape))
    if count % encoding.block_values or raw.size != count // encoding.block_values * encoding.block_bytes:
        raise LoadError(f"{raw.size} bytes can't hold {count} values of the type {encoding.name}")
    return encoding.decode(raw.reshape(-1, encoding.block_bytes)).reshape(shape)


def encoding_of(type_id: int) -> Encoding:
    """The encoding of a ggml type number. Raises LoadError for one that can't be read."""
    if type_id not in ENCODINGS:
        raise LoadError(f"ggml type {type_id} can't be read; supported are {', '.join(e.name for e in ENCODINGS.values())}")
    return ENCODINGS[type_id]


def _half(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of every block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """uint8 [blocks, 16] -> [blocks, 32]: low halves first, then high halves."""
    return np.concatenate([packed & 0xF, packed >> 4], axis=1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """32 bits at byte `at`, as 0 or 16 for each of the block's values."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _f32(blocks: Array) -> Array:
    return blocks.copy().view(np.float32)


def _f16(blocks: Array) -> Array:
    return blocks.copy().view(np.float16).astype(np.float32)


def _bf16(blocks: Array) -> Array:
    return (blocks.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Array) -> Array:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:18]).astype(np.int8) - 8).astype(np.float32)


def _q4_1(blocks: Array) -> Array:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:20]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Array) -> Array:
    values = (_nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2)).astype(np.int8) - 16
    return _half(blocks, 0) * values.astype(np.float32)


def _q5_1(blocks: Array) -> Array:
    values = _nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * values.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Array) -> Array:
    return _half(blocks, 0) * blocks[:, 2:34].view(np.int8).astype(np.float32)


def _k_scales(packed: Array) -> tuple[Array, Array]:
    """12 bytes hold eight 6-bit scales and eight 6-bit minima: float32 [blocks, 8, 1] each."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 0xF) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32)[..., None], minima.astype(np.float32)[..., None]


def _q4_k(blocks: Array) -> Array:
    scales, minima = _k_scales(blocks[:, 4:16])
    packed = blocks[:, 16:144].reshape(-1, 4, 1, GROUP)
    values = np.concatenate([packed & 0xF, packed >> 4], axis=2).reshape(-1, 8, GROUP).astype(np.float32)
    return ((_half(blocks, 0)[..., None] * scales) * values - _half(blocks, 2)[..., None] * minima).reshape(-1, SUPER)


def _q5_k(blocks: Array) -> Array:
    scales, minima = _k_scales(blocks[:, 4:16])
    packed = blocks[:, 48:176].reshape(-1, 4, 1, GROUP)
    low = np.concatenate([packed & 0xF, packed >> 4], axis=2).reshape(-1, 8, GROUP)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    values = (low | (high << 4)).astype(np.float32)
    return ((_half(blocks, 0)[..., None] * scales) * values - _half(blocks, 2)[..., None] * minima).reshape(-1, SUPER)


def _q6_k(blocks: Array) -> Array:
    packed = blocks[:, 0:128].reshape(-1, 2, 1, 64)
    low = np.concatenate([packed & 0xF, packed >> 4], axis=2).reshape(-1, 8, GROUP)
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, GROUP) >> shifts) & 3).reshape(-1, 8, GROUP)
    values = (low | (high << 4)).astype(np.int8) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[..., None] * values.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, SUPER)


ENCODINGS = {
    0: Encoding("F32", 1, 4, _f32),
    1: Encoding("F16", 1, 2, _f16),
    2: Encoding("Q4_0", GROUP, 18, _q4_0),
    3: Encoding("Q4_1", GROUP, 20, _q4_1),
    6: Encoding("Q5_0", GROUP, 22, _q5_0),
    7: Encoding("Q5_1", GROUP, 24, _q5_1),
    8: Encoding("Q8_0", GROUP, 34, _q8_0),
    12: Encoding("Q4_K", SUPER, 144, _q4_k),
    13: Encoding("Q5_K", SUPER, 176, _q5_k),
    14: Encoding("Q6_K", SUPER, 210, _q6_k),
    30: Encoding("BF16", 1, 2, _bf16),
}
