"""The header of a GGUF file: metadata and where each tensor lies.

Owns the container's layout (version 2 and 3, little endian; ggml's `docs/gguf.md` defines it). Knows nothing about what
the keys mean; block layouts are `specengine.quant.gguf`'s.

    header = read_header(Path("model.gguf"))
    header.metadata["general.architecture"]; header.tensors[0].shape
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specengine.errors import LoadError
from specengine.quant.gguf import ENCODINGS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8
STRING, ARRAY, BOOL = 8, 9, 7
# GGUF's value types, as little-endian struct codes.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorInfo:
    """`shape` is row-major (slowest dimension first), as PyTorch has it; `offset` counts bytes from `data_start`."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data_start: int
    alignment: int


def read_header(path: Path) -> GGUFHeader:
    """Reads the header, not the tensors. Numeric arrays become numpy arrays, arrays of strings lists of str.

    Raises:
        LoadError: the file can't be opened, is no GGUF file of a known version, or ends before its tensors do.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            if file.read(4) != MAGIC:
                raise LoadError(f"{path} is not a GGUF file: it doesn't begin with the letters GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, path).header()
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}") from None


class _Reader:
    """A cursor over the mapped file; running past the end is a LoadError."""

    def __init__(self, data: mmap.mmap, path: Path):
        self._data = data
        self._path = path
        self._size = len(data)
        self._at = len(MAGIC)

    def header(self) -> GGUFHeader:
        version = self._scalar("I")
        if version not in VERSIONS:
            raise LoadError(f"{self._path} has GGUF version {version}; supported are little-endian files of versions 2 and 3")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise LoadError(f"{self._path} has general.alignment {alignment!r}; allowed is a whole number from 1")
        start = -(-self._at // alignment) * alignment
        for tensor in tensors:
            self._check_extent(tensor, start)
        return GGUFHeader(metadata, tensors, start, alignment)

    def _take(self, size: int) -> int:
        """Moves past `size` bytes; returns where they begin."""
        begin = self._at
        if size > self._size - begin:
            raise LoadError(f"{self._path} is cut off: its header runs past the end of the file, at {self._size} bytes")
        self._at = begin + size
        return begin

    def _scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._data, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        size = self._scalar("Q")
        begin = self._take(size)
        # Some vocabularies hold broken UTF-8; a marked character is better than no model.
        return self._data[begin : begin + size].decode("utf-8", errors="replace")

    def _strings(self, count: int) -> list[str]:
        """The loop over a vocabulary: plain local names, since it runs some hundred thousand times."""
        data, at, size, length = self._data, self._at, self._size, struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            if size - at < 8:
                break
            end = at + 8 + length(data, at)[0]
            if end > size:
                break
            found.append(data[at + 8 : end].decode("utf-8", errors="replace"))
            at = end
        if len(found) < count:
            self._take(size)
        self._at = at
        return found

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        return self._scalar(self._code(kind))

    def _array(self) -> Any:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == STRING:
            return self._strings(count)
        if kind == ARRAY:
            return [self._array() for _ in range(count)]
        dtype = np.dtype("<" + self._code(kind))
        begin = self._take(count * dtype.itemsize)
        return np.frombuffer(self._data[begin : self._at], dtype)

    def _code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise LoadError(f"{self._path} is damaged: its metadata has a value of the unknown type {kind}")
        return SCALARS[kind]

    def _tensor(self) -> TensorInfo:
        name = self._string()
        dimensions = self._scalar("I")
        if dimensions > MAX_DIMENSIONS:
            raise LoadError(f"{self._path} is damaged: the tensor {name} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))
        return TensorInfo(name, shape[::-1], self._scalar("I"), self._scalar("Q"))

    def _check_extent(self, tensor: TensorInfo, start: int) -> None:
        """The tensor lies inside the file; of an encoding that isn't known, its first byte does."""
        size = 1
        encoding = ENCODINGS.get(tensor.ggml_type)
        if encoding is not None:
            count = 1
            for extent in tensor.shape:
                count *= extent
            size = -(-count // encoding.block_values) * encoding.block_bytes
        if start + tensor.offset + size > self._size:
            raise LoadError(f"{self._path} is cut off: the tensor {tensor.name} runs past the end of the file, at {self._size} bytes")
