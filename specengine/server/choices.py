"""One choice of an answer as it grows: its text, and per token what was asked for (log-probabilities, provenance).

Owns the rule that a token's entry leaves with its text: nothing of a stop string that the text holds back shows up
earlier in the entries, and the tokens of a completion join to its text. Knows nothing about JSON shapes.

    choice = Choice(0, tokenizer, prompt_token_ids, params)
    piece = choice.feed(delta)
    piece.text, piece.entries, piece.finish_reason
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from specengine.engine.messages import RequestDelta
from specengine.outputs import Logprob, Provenance
from specengine.sampling_params import SamplingParams
from specengine.server.prompts import Prompt
from specengine.tokenizer import Detokenizer, Tokenizer


@dataclass
class Entry:
    """One token. `text` is what it adds to the text, "" where it only begins a character; `offset` is where that starts."""

    token_id: int
    text: str
    offset: int
    logprobs: dict[int, Logprob] | None = None
    provenance: Provenance | None = None


@dataclass
class Piece:
    """What one delta adds to a choice."""

    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.entries or self.finish_reason)


class Choice:
    """`text` and `entries` are what has been released so far; `num_tokens` counts all that the engine gave."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams):
        self.index = index
        self.text = ""
        self.entries: list[Entry] = []
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.has_logprobs = params.logprobs is not None
        self.has_provenance = params.return_provenance
        self._detokenizer: Detokenizer | None = None
        if self.has_logprobs or self.has_provenance:
            self._detokenizer = Detokenizer(tokenizer, prompt.token_ids, skip_special_tokens=params.skip_special_tokens)
        self._held: deque[Entry] = deque()
        self._end = 0  # characters that all tokens so far stand for, stop string included

    def feed(self, delta: RequestDelta) -> Piece:
        self.num_tokens += len(delta.token_ids)
        self.text += delta.text
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self._detokenizer is not None:
            self._hold(delta, self._detokenizer)
        piece = Piece(delta.text, self._released(), delta.finish_reason, delta.stop_reason)
        self.entries.extend(piece.entries)
        return piece

    def _hold(self, delta: RequestDelta, detokenizer: Detokenizer) -> None:
        for place, token_id in enumerate(delta.token_ids):
            text = detokenizer.feed(token_id)
            entry = Entry(token_id, text, self._end)
            if delta.logprobs is not None:
                entry.logprobs = delta.logprobs[place]
            if delta.provenance is not None:
                entry.provenance = delta.provenance[place]
            self._end += len(text)
            self._held.append(entry)
        if delta.finish_reason is not None and self._held:
            self._held[-1].text += detokenizer.flush()

    def _released(self) -> list[Entry]:
        released = []
        while self._held:
            entry = self._held[0]
            if self.finish_reason is None and entry.offset + len(entry.text) > len(self.text):
                break
            entry.text = self.text[entry.offset : entry.offset + len(entry.text)]
            entry.offset = min(entry.offset, len(self.text))
            released.append(self._held.popleft())
        return released


def echoed(tokenizer: Tokenizer, prompt: Prompt, logprobs: list[dict[int, Logprob] | None] | None) -> tuple[str, list[Entry]]:
    """A prompt's text and, where its log-probabilities are given, its tokens' entries; they join to the text.

    A BOS in front is no text: the tokenizer put it there.
    """
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=False)
    entries, text = [], ""
    for place, token_id in enumerate(prompt.token_ids):
        piece = "" if place == 0 and token_id == tokenizer.bos_token_id else detokenizer.feed(token_id)
        entries.append(Entry(token_id, piece, len(text), None if logprobs is None else logprobs[place]))
        text += piece
    if logprobs is None:
        return text if prompt.text is None else prompt.text, []
    return text, entries


def finite(logprob: float) -> float | None:
    """JSON has no infinity: an impossible token's log-probability is null."""
    return logprob if math.isfinite(logprob) else None


def completion_logprobs(tokenizer: Tokenizer, entries: list[Entry], offset: int = 0) -> dict[str, Any]:
    """OpenAI's shape for completions. `offset` is added to where each token's text starts."""
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [None if entry.logprobs is None else finite(entry.logprobs[entry.token_id].logprob) for entry in entries],
        "top_logprobs": [_top(tokenizer, entry) for entry in entries],
        "text_offset": [entry.offset + offset for entry in entries],
    }


def _top(tokenizer: Tokenizer, entry: Entry) -> dict[str, float | None] | None:
    """Alternatives by their text; the token itself goes by the same text as in `tokens`."""
    if entry.logprobs is None:
        return None
    found: dict[str, float | None] = {entry.text: finite(entry.logprobs[entry.token_id].logprob)}
    for token_id, logprob in _ranked(entry.logprobs):
        if token_id != entry.token_id:
            found.setdefault(tokenizer.token_text(token_id), finite(logprob.logprob))
    return found


def chat_logprobs(tokenizer: Tokenizer, entries: list[Entry], num_top: int) -> dict[str, Any]:
    """OpenAI's shape for chat: tokens with their bytes, and `num_top` alternatives each, the likeliest first."""
    content = []
    for entry in entries:
        logprobs = entry.logprobs or {}
        item = _chat_token(tokenizer, entry.token_id, logprobs[entry.token_id]) if logprobs else {}
        ranked = [pair for pair in _ranked(logprobs) if pair[1].rank <= num_top]
        item["top_logprobs"] = [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in ranked[:num_top]]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: Logprob) -> dict[str, Any]:
    return {"token": tokenizer.token_text(token_id), "logprob": finite(logprob.logprob), "bytes": list(tokenizer.token_bytes(token_id))}


def _ranked(logprobs: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(logprobs.items(), key=lambda pair: pair[1].rank)


def prompt_logprobs(logprobs: list[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: one object a token of the prompt, keyed by token id; the first is null."""
    return [
        None if entry is None else {str(token_id): {"logprob": finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
                                    for token_id, p in entry.items()}
        for entry in logprobs
    ]  # fmt: skip
