"""Text that grows token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from specengine.tokenizer import Detokenizer, Tokenizer
from tests import fixtures
from tests.vocabularies import EMOJI, folder_with, grown, load, load_once, sentencepiece_gguf


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(folder_with(tmp_path_factory.mktemp("tok")))


def test_a_character_split_over_tokens(byte_tokenizer: Tokenizer):
    detokenizer = Detokenizer(byte_tokenizer, [97], skip_special_tokens=True)
    assert [detokenizer.feed(token) for token in [104, 105, *EMOJI, 33]] == ["h", "i", "", "", "", "😀", "!"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_flushed_or_forgotten(byte_tokenizer: Tokenizer):
    detokenizer = Detokenizer(byte_tokenizer, [97])
    assert detokenizer.feed(EMOJI[0]) + detokenizer.feed(EMOJI[1]) == ""
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")
    detokenizer.feed(EMOJI[0])
    detokenizer.reset()
    assert detokenizer.flush() + detokenizer.feed(104) == "h"


def test_the_output_completes_the_prompt_s_last_character(byte_tokenizer: Tokenizer):
    assert grown(byte_tokenizer, EMOJI[2:], [97, *EMOJI[:2]]) == "😀"
    assert grown(byte_tokenizer, [104], [97, *EMOJI[:2]]) == "\ufffdh"


def test_special_tokens_in_growing_text(byte_tokenizer: Tokenizer):
    assert grown(byte_tokenizer, [97, 258, 98], skip=True) == "ab"
    assert grown(byte_tokenizer, [97, 258, 98], skip=False) == "a<|end|>b"
    assert grown(byte_tokenizer, [*EMOJI[:2], 258, *EMOJI[2:]], skip=True) == "😀"


def test_endless_broken_bytes_come_out_at_once(byte_tokenizer: Tokenizer):
    detokenizer = Detokenizer(byte_tokenizer, [])
    assert [detokenizer.feed(0xFF) for _ in range(3)] == ["\ufffd"] * 3


@given(st.lists(st.one_of(st.integers(0, 263), st.sampled_from([*EMOJI, 0xE3, 0x81, 0x82, 0xC3, 0xA9])), max_size=40), st.booleans())
@settings(max_examples=300, deadline=None)
def test_growing_text_is_the_decoded_text(token_ids: list[int], skip: bool):
    tokenizer = load_once(fixtures.alphabet())
    assert grown(tokenizer, token_ids, skip=skip) == tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_a_decoder_of_another_kind(tmp_path: Path):
    """WordPiece joins `##` pieces: text comes from decoding a window."""
    words = ["the", "un", "##able", "dog", "!", "[UNK]"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert not tokenizer.has_token_bytes
    assert grown(tokenizer, [0, 1, 2, 3, 4] * 5) == tokenizer.decode([0, 1, 2, 3, 4] * 5)
    assert grown(tokenizer, [2, 3], [0, 1]) == "able dog"


def test_split_characters_with_a_decoder_of_another_kind(tmp_path: Path):
    """They are held back until they are whole, and bytes that never become one aren't held for ever."""
    backend = tokenizers.Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert not tokenizer.has_token_bytes
    detokenizer = Detokenizer(tokenizer, [97])
    assert [detokenizer.feed(token) for token in [104, *EMOJI, 33]] == ["h", "", "", "", "😀", "!"]
    assert "\ufffd" in "".join(detokenizer.feed(0xFF) for _ in range(20))
    detokenizer.feed(EMOJI[0])
    detokenizer.reset()
    assert detokenizer.flush() == ""


def test_first_space_of_a_growing_text(tmp_path: Path):
    """The space of `▁a` is text after other text, and no text at the very start."""
    tokenizer = load(sentencepiece_gguf(tmp_path / "m.gguf", {"▁": -1.0, "a": -2.0, "b": -3.0, "▁a": -4.0}))
    a, emoji = 262, [3 + byte for byte in EMOJI]
    assert grown(tokenizer, [a, a], []) == "a a"
    assert grown(tokenizer, [a, a], [1]) == "a a"
    assert grown(tokenizer, [a], [1], skip=False) == " a"
    assert grown(tokenizer, [a], [1, 261]) == " a"
    assert grown(tokenizer, [a], [261, *[1] * 20]) == " a"
    assert grown(tokenizer, [a, *emoji, a], [261]) == " a😀 a"
    assert grown(tokenizer, [261, a, *emoji], []) == tokenizer.decode([261, a, *emoji])
