"""Tokenizers out of a GGUF file's metadata."""

from __future__ import annotations

import logging
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from specengine.errors import LoadError
from specengine.tokenizer.gguf import UNUSED
from tests import fixtures
from tests.vocabularies import EMOJI, USER, byte_level_gguf, load, pieces, sentencepiece_gguf, write_gguf


def test_gguf_byte_level(tmp_path: Path):
    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf", ["a b", "ab c"], chat_template="{{ eos_token }}{{ messages[0].content }}"))
    assert pieces(tokenizer, "abcab<s>a<tool>") == ["abc", "ab", "<s>", "a", "<tool>"]
    assert (tokenizer.num_token_ids, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (262, 258, [259, 260])
    assert tokenizer.special_token_ids == {258, 259, 260}
    assert tokenizer.encode("a") == [97]
    assert tokenizer.apply_chat_template(USER) == "</s>Hi"
    assert tokenizer.decode(tokenizer.encode("h😀 \n")) == "h😀 \n"


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("gpt-2", "it's 123 x", ["it", "'s", " 123", " x"]),
        ("smollm", "it's 123 x²", ["it", "'s", " ", "1", "2", "3", " x", "²"]),
        ("llama-bpe", "IT'S 12345 (x)\n\n y", ["IT", "'S", " ", "123", "45", " (", "x", ")\n\n", " y"]),
        ("llama3", "12345", ["123", "45"]),
        ("qwen2", "IT'S 12 (x)\n\n y", ["IT", "'S", " ", "1", "2", " (", "x", ")\n\n", " y"]),
        ("default", "a+1234 x!", ["a", "+", "123", "4", " x", "!"]),
    ],
)
def test_gguf_pre_tokenizers(tmp_path: Path, pre: str, text: str, cut: list[str]):
    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf", [], pre=pre))
    found = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == cut


def test_gguf_bos_and_eos_around_a_text(tmp_path: Path):
    names = {"smollm": (False, None), "llama-bpe": (True, None), "qwen2": (True, True)}
    for pre, (bos, eos) in names.items():
        values = {"add_eos_token": eos} if eos is not None else {}
        values |= {"add_bos_token": True} if pre == "qwen2" else {}
        tokenizer = load(byte_level_gguf(tmp_path / f"{pre}.gguf", [], pre=pre, **values))
        assert tokenizer.encode("a") == [256] * bos + [ord("a")] + [257] * bool(eos)
        assert tokenizer.encode("a", add_special_tokens=False) == [ord("a")]


def test_gguf_whole_words_and_composed_characters(tmp_path: Path):
    """Llama 3 takes a known word whole though no merge makes it; Qwen 2 composes characters first."""
    for pre, whole in (("llama-bpe", ["xy"]), ("qwen2", ["x", "y"])):
        assert pieces(load(byte_level_gguf(tmp_path / f"{pre}.gguf", ["x y"], pre=pre, merges=[])), "xy") == whole
    tokenizer = load(byte_level_gguf(tmp_path / "q.gguf", [], pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == unicodedata.normalize("NFC", "e\u0301")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pre": "newest"}, "the pre-tokenizer 'newest'; supported are "),
        ({"merges": ["a zz"]}, "can't be built: "),
        ({"kind": "bert"}, "the tokenizer 'bert' in tokenizer.ggml.model; supported are 'gpt2' and 'llama'"),
        ({"kind": "llama"}, "too few entries in tokenizer.ggml.scores for 260 tokens"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_read(tmp_path: Path, values: dict[str, Any], words: str):
    with pytest.raises(LoadError, match=words) as caught:
        load(byte_level_gguf(tmp_path / "odd.gguf", [], **values))
    assert "odd.gguf" in str(caught.value)


def best_first(text: str, scored: dict[str, float]) -> list[str]:
    """SentencePiece's BPE in its plainest form: join the pair with the best score, the leftmost among equals."""
    parts = list(text)
    while True:
        pairs = [(-scored[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in scored]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = ["".join(parts[i : i + 2])]


def test_gguf_sentencepiece_joins_the_best_pair(tmp_path: Path):
    """On random vocabularies, against the plainest form of the algorithm."""
    generator = random.Random(7)
    for number in range(10):
        found = dict.fromkeys("▁abc")
        for _ in range(25):
            left, right = generator.choice(list(found)), generator.choice(list(found))
            found.setdefault(left + right)
        scored = dict(zip(found, map(float, generator.sample(range(-len(found), 0), len(found))), strict=True))
        tokenizer = load(sentencepiece_gguf(tmp_path / f"{number}.gguf", scored))
        for _ in range(30):
            text = "".join(generator.choice("abc ") for _ in range(generator.randrange(1, 20)))
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert [tokenizer.piece(token) for token in ids] == best_first("▁" + text.replace(" ", "▁"), scored)
            assert tokenizer.decode(ids) == text


def test_gguf_sentencepiece_bytes_spaces_and_ends(tmp_path: Path):
    scored = {"▁": -1.0, "a": -2.0, "b": -3.0, "▁a": -4.0}
    tokenizer = load(sentencepiece_gguf(tmp_path / "m.gguf", scored))
    emoji = [3 + byte for byte in EMOJI]
    assert tokenizer.encode("a😀") == [1, 262, *emoji]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_token_ids) == (1, [2], {0, 1, 2})
    assert tokenizer.decode([1, 262, *emoji], skip_special_tokens=True) == "a😀"
    assert tokenizer.token_text(262) == " a"
    assert tokenizer.token_bytes(emoji[0]) == bytes(EMOJI[:1])
    bare = load(sentencepiece_gguf(tmp_path / "bare.gguf", scored, add_space_prefix=False, add_bos_token=False))
    assert bare.encode("a a") == [260, 262]
    assert bare.decode([262]) == " a"


def test_unused_entries_within_the_vocabulary_stay(tmp_path: Path):
    tokens = [*fixtures.byte_characters(), "<x>", "<s>", "<y>"]
    tokenizer = load(write_gguf(tmp_path / "m.gguf", tokens, [*[1] * 256, UNUSED, 3, UNUSED], pre="gpt-2"))
    assert (tokenizer.num_token_ids, tokenizer.piece(256), tokenizer.piece(258)) == (258, "<x>", None)


def test_a_missing_pre_tokenizer_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    file = write_gguf(tmp_path / "m.gguf", fixtures.byte_characters(), [1] * 256)
    monkeypatch.setattr(logging.getLogger("specengine"), "propagate", True)  # another test may have set up logging
    with caplog.at_level("WARNING", "specengine"):
        assert pieces(load(file), "a+1") == ["a", "+", "1"]
    assert "m.gguf doesn't name its pre-tokenizer (tokenizer.ggml.pre): 'default' is used" in caplog.text
