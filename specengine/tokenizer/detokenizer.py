"""`Detokenizer`: the text of one growing output, in pieces that stay as they are.

Owns what is held back: the bytes of a character that isn't complete. Knows nothing about stop strings or requests.

    detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=True)
    text = detokenizer.feed(token_id) + ... + detokenizer.flush()
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from specengine.tokenizer.base import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6  # how much of the prompt is looked at: more than any character has bytes
MAX_HELD_TOKENS = 8  # what doesn't become a character after so many tokens never will


class Detokenizer:
    """The sum of the pieces is the text of the output alone, as it reads after the prompt.

    The prompt decides whether a first space is text (it is, after other text) and completes a character that the prompt
    left unfinished. Bytes that are no UTF-8 become U+FFFD, one for each maximal broken part (the Unicode standard's
    recommendation, and what `Tokenizer.decode` does for byte-level vocabularies). Costs a table look-up a token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True):
        self._skipped: set[int] = tokenizer.special_token_ids if skip_special_tokens else set()
        context = [token for token in prompt_token_ids[-CONTEXT_TOKENS:] if token not in self._skipped]
        if not context:  # only special tokens there; text may have come before them
            context = [token for token in prompt_token_ids if token not in self._skipped][-CONTEXT_TOKENS:]
        self._stream: _Stream = _ByteStream(tokenizer, context) if tokenizer.has_token_bytes else _WindowStream(tokenizer, context)

    def feed(self, token_id: int) -> str:
        """The text that is certain now and wasn't before; "" while a character is incomplete."""
        return "" if token_id in self._skipped else self._stream.feed(token_id)

    def flush(self) -> str:
        """What is still held back: an incomplete character, as U+FFFD. The output ends here."""
        return self._stream.flush()

    def reset(self) -> None:
        """Forgets what is held back."""
        self._stream.reset()


class _Stream(Protocol):
    def feed(self, token_id: int) -> str: ...
    def flush(self) -> str: ...
    def reset(self) -> None: ...


class _ByteStream:
    """For vocabularies whose entries are bytes: an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]):
        self._bytes_of = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(self._bytes_of(token) for token in context))
        self._at_start = tokenizer.strips_first_space and not context

    def feed(self, token_id: int) -> str:
        data = self._bytes_of(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def reset(self) -> None:
        self._decoder.reset()


class _WindowStream:
    """For every other decoder: decodes the last tokens with and without the new one, and takes the difference."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]):
        self._decode = tokenizer.decode
        self._shown = context  # tokens whose text is out; decoders look at a few of them
        self._held: list[int] = []

    def feed(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._difference()
        if (not text or text.endswith(REPLACEMENT)) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        self._shown = (self._shown + self._held)[-CONTEXT_TOKENS:]
        self._held = []
        return text

    def flush(self) -> str:
        text = self._difference() if self._held else ""
        self.reset()
        return text

    def reset(self) -> None:
        self._held = []

    def _difference(self) -> str:
        before = self._decode(self._shown) if self._shown else ""
        return self._decode(self._shown + self._held)[len(before) :]
