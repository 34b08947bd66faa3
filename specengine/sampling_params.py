"""What a user may ask of one generation; validated once, here.

Knows nothing about models: checks that need a vocabulary or a context length happen where a request is added.

    SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, seed=1)
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from specengine.errors import RequestError

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would overflow float32


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters under vLLM's and OpenAI's names. Raises RequestError naming the field at fault.

    `max_tokens` None means the room left in the context. `speculation` is None (the engine's default), False (off) or
    a dict such as ``{"num_speculative_tokens": 4, "tree_width": 2}``.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None
    speculation: bool | dict[str, Any] | None = None
    prediction: str | list[int] | None = None
    return_provenance: bool = False
    priority: int = 0
    cache_salt: str | None = None
    bad_words_token_ids: list[list[int]] | None = None  # filled in by the engine from bad_words

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return msgspec.structs.replace(self, **changes)


def _validate(p: SamplingParams) -> None:
    _integer(p, "n", low=1, high=128)
    _number(p, "temperature", low=0.0, high=math.inf)
    _number(p, "top_p", low=0.0, high=1.0, open_low=True)
    _integer(p, "top_k", low=-1)
    _number(p, "min_p", low=0.0, high=1.0)
    _number(p, "presence_penalty", low=-2.0, high=2.0)
    _number(p, "frequency_penalty", low=-2.0, high=2.0)
    _number(p, "repetition_penalty", low=0.0, high=math.inf, open_low=True)
    _integer(p, "max_tokens", low=0, optional=True)
    _integer(p, "min_tokens", low=0)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise RequestError(f"min_tokens is {p.min_tokens}; allowed is at most max_tokens, {p.max_tokens}", "min_tokens")
    _integer(p, "logprobs", low=0, optional=True)
    _integer(p, "prompt_logprobs", low=0, optional=True)
    _integer(p, "seed", low=-(2**63), high=2**64 - 1, optional=True)
    _integer(p, "priority", low=-(2**31), high=2**31 - 1)
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "return_provenance"):
        if not isinstance(getattr(p, name), bool):
            raise RequestError(f"{name} is {getattr(p, name)!r}; allowed is true or false", name)
    _strings(p.stop_strings, "stop")
    _strings(tuple(p.bad_words or ()), "bad_words")
    _token_ids(p.stop_token_ids, "stop_token_ids")
    _token_ids(p.allowed_token_ids, "allowed_token_ids")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise RequestError("allowed_token_ids is empty; allowed is a list of at least one token id", "allowed_token_ids")
    _logit_bias(p.logit_bias)
    if p.speculation not in (None, False, True) and not isinstance(p.speculation, dict):
        raise RequestError(f"speculation is {p.speculation!r}; allowed is null, false or an object", "speculation")
    if p.cache_salt is not None and (not isinstance(p.cache_salt, str) or not p.cache_salt):
        raise RequestError("cache_salt must be a string of at least one character", "cache_salt")


def _number(p: SamplingParams, name: str, *, low: float, high: float, open_low: bool = False) -> None:
    value = getattr(p, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} is {value!r}; allowed is a number", name)
    inside = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
    if not inside:
        bound = f"{'(' if open_low else '['}{low:g}, {high:g}]" if high < math.inf else f"{'above' if open_low else 'at least'} {low:g}"
        raise RequestError(f"{name} is {value!r}; allowed is a finite number {'in ' if high < math.inf else ''}{bound}", name)


def _integer(p: SamplingParams, name: str, *, low: int, high: int | None = None, optional: bool = False) -> None:
    value = getattr(p, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; allowed is an integer", name)
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise RequestError(f"{name} is {value}; allowed is {allowed}", name)


def _strings(values: tuple[Any, ...], name: str) -> None:
    for value in values:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name} holds {value!r}; allowed are strings of at least one character", name)


def _token_ids(values: Any, name: str) -> None:
    if values is None:
        return
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(f"{name} holds {value!r}; allowed are token ids, integers from 0", name)


def _logit_bias(bias: Any) -> None:
    if bias is None:
        return
    for token, value in bias.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(f"logit_bias has the key {token!r}; allowed are token ids, integers from 0", "logit_bias")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise RequestError(f"logit_bias of token {token} is {value!r}; allowed is a number in [-100, 100]", "logit_bias")
