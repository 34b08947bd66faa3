"""The GGUF header against files that the `gguf` package wrote, whole and damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from specengine.errors import LoadError
from specengine.quant.gguf_header import TensorInfo, read_header

WORDS = ["", "a", "Ġthe", "😀", "x" * 300]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "whole.gguf")


def write(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -70_000)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 40))
    writer.add_float32("f32", 0.25)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 😀")
    writer.add_array("words", WORDS)
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("ints", [1, -2, 3])
    writer.add_tensor("wide", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.arange(32, dtype=np.float16).reshape(1, 4, 8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_value(whole: Path):
    metadata = read_header(whole).metadata
    expected = {
        "general.architecture": "llama", "u8": 200, "i8": -3, "u16": 60000, "i16": -300, "u32": 4_000_000_000, "i32": -70_000,
        "u64": 1 << 63, "i64": -(1 << 40), "f32": 0.25, "f64": 0.1, "yes": True, "text": "naïve 😀", "words": WORDS,
    }  # fmt: skip
    assert {key: metadata[key] for key in expected} == expected
    assert metadata["yes"] is True
    np.testing.assert_array_equal(metadata["floats"], np.array([0.5, -1.5], np.float32))
    np.testing.assert_array_equal(metadata["ints"], np.array([1, -2, 3], np.int32))


@pytest.mark.parametrize("alignment", [None, 64, 8])
def test_tensors_lie_where_the_header_says(tmp_path: Path, alignment: int | None):
    path = write(tmp_path / "aligned.gguf", alignment)
    header = read_header(path)
    assert header.alignment == (alignment or 32)
    assert header.data_start % header.alignment == 0
    wide, half = header.tensors
    assert (wide.name, wide.shape, wide.ggml_type, wide.offset) == ("wide", (2, 3), 0, 0)
    assert (half.name, half.shape, half.ggml_type) == ("half", (1, 4, 8), 1)
    data = path.read_bytes()
    np.testing.assert_array_equal(np.frombuffer(data, np.float32, 6, header.data_start), np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(np.frombuffer(data, np.float16, 32, header.data_start + half.offset), np.arange(32, dtype=np.float16))


def test_a_file_that_is_cut_off_anywhere_is_refused(whole: Path, tmp_path: Path):
    data = whole.read_bytes()
    last = read_header(whole).tensors[-1]
    end = read_header(whole).data_start + last.offset + 64  # what follows is padding
    broken = tmp_path / "broken.gguf"
    for size in [*range(4, end, 7), end - 1]:
        broken.write_bytes(data[:size])
        with pytest.raises(LoadError, match=r"broken\.gguf is cut off"):
            read_header(broken)
    broken.write_bytes(data[:end])
    assert read_header(broken).tensors[-1] == last


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(100), b"<html>"])
def test_other_files(tmp_path: Path, content: bytes):
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(LoadError, match=r"other\.gguf is not a GGUF file"):
        read_header(tmp_path / "other.gguf")


def test_files_that_cannot_be_opened(tmp_path: Path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(LoadError, match="can't be read: "):
            read_header(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; supported"),
        (struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648; supported are little-endian"),
        (struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "a value of the unknown type 77"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 77, 2), "a value of the unknown type 77"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60), "is cut off"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 12, 1 << 60), "is cut off"),
        (struct.pack("<IQQQ17sII", 3, 0, 1, 17, b"general.alignment", 4, 0), "general.alignment 0; allowed"),
        (struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 99), "the tensor t has 99 dimensions"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, words: str):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + content)
    with pytest.raises(LoadError, match=words) as caught:
        read_header(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(caught.value)


def test_a_tensor_of_an_unknown_encoding_is_listed(tmp_path: Path):
    """What can't be decoded may still not be needed."""
    head = struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 256, 999, 0)
    (tmp_path / "new.gguf").write_bytes((b"GGUF" + head).ljust(96, b"\0"))
    assert read_header(tmp_path / "new.gguf").tensors == [TensorInfo("t", (256,), 999, 0)]
