"""Tokenizer folders and GGUF files for tests, and short ways to load them; knows nothing about models.

tokenizer = load(byte_level_gguf(path / "m.gguf", ["a b"]))
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf

from specengine.hub import ResolvedModel
from specengine.tokenizer import Detokenizer, Tokenizer
from specengine.tokenizer.gguf import UNUSED
from tests import fixtures

EMOJI = list("😀".encode())
USER = [{"role": "user", "content": "Hi"}]


def load(folder: Path, **options: Any) -> Tokenizer:
    return Tokenizer.load(ResolvedModel("gguf" if folder.suffix == ".gguf" else "hf", folder, folder.name), **options)


@functools.cache
def load_once(folder: Path) -> Tokenizer:
    return load(folder)


def folder_with(folder: Path, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None, **options: Any) -> Path:
    fixtures.write_tokenizer(folder, **options)
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        if value is not None:
            fixtures.write_json(folder / name, value)
    return folder


def grown(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None, *, skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, prompt or [], skip_special_tokens=skip)
    return "".join(detokenizer.feed(token) for token in token_ids) + detokenizer.flush()


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def write_gguf(path: Path, tokens: list[str], types: list[int], *, kind: str = "gpt2", **values: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in values.items():
        name = "tokenizer." + ("" if key == "chat_template" else "ggml.") + key
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, merged: list[str], **values: Any) -> Path:
    """256 bytes, then `merged` ("a b" pieces), then <s>, </s>, <|eot|> and a user-defined <tool>, then two padding entries."""
    tokens = fixtures.byte_characters() + [merge.replace(" ", "") for merge in merged]
    ends = ["<s>", "</s>", "<|eot|>", "<tool>", "[PAD1]", "[PAD2]"]
    types = [1] * len(tokens) + [3, 3, 3, 4, UNUSED, UNUSED]
    first = len(tokens)
    defaults = {"pre": "gpt-2", "merges": merged, "bos_token_id": first, "eos_token_id": first + 1, "eot_token_id": first + 2}
    return write_gguf(path, tokens + ends, types, **(defaults | values))


def sentencepiece_gguf(path: Path, scored: dict[str, float], **values: Any) -> Path:
    """<unk>, <s>, </s>, 256 byte tokens, then `scored`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scored]
    types = [2, 3, 3, *[6] * 256, *[1] * len(scored)]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write_gguf(path, tokens, types, kind="llama", **(ends | {"scores": [0.0] * 259 + list(scored.values())} | values))
