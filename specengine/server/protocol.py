"""What a request's body may hold: our fields, the ones without effect, the ones that are refused, and nothing else.

Owns the names, their types and how a wrong one is reported. The fields of `SamplingParams` are taken from it, so a new one is
a field here at once. Knows nothing about prompts' contents or answers.

    body, sampling = read_body(raw, CompletionBody)
    params = sampling_params(sampling, {"max_tokens": 16})
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from specengine.errors import RequestError
from specengine.sampling_params import SamplingParams

INTERNAL = {"bad_words_token_ids"}
SAMPLING_FIELDS = {field.name for field in msgspec.structs.fields(SamplingParams)} - INTERNAL
# Accepted without effect, whatever their value, or with the one value that asks for nothing (decision 23).
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
IGNORED_VALUES: dict[str, tuple[Any, ...]] = {"store": (False,), "service_tier": ("auto",)}
# Known and refused. The values listed ask for nothing, so they pass.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
JSON_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
WRONG_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)` - at (.+)")

T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class CompletionBody(msgspec.Struct):
    """`POST /v1/completions`, beside the sampling fields. `prompt` is looked at in `prompts.py`."""

    prompt: Any
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True
    return_metrics: bool = False


class ChatBody(msgspec.Struct):
    """`POST /v1/chat/completions`, beside the sampling fields."""

    messages: list[dict[str, Any]]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_metrics: bool = False


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`: `prompt`, or `messages` as a chat would send them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


def read_body(raw: bytes, struct: type[T], *, sampling: bool = True) -> tuple[T, dict[str, Any]]:
    """A body as `struct`, and the sampling fields that it names. A null is the same as no field.

    Raises RequestError naming the field at fault.
    """
    body = {name: value for name, value in read_json(raw).items() if value is not None}
    own = {field.name for field in msgspec.structs.fields(struct)}
    known = own | (SAMPLING_FIELDS if sampling else set())
    accepted = known | IGNORED | IGNORED_VALUES.keys() | (UNSUPPORTED.keys() if sampling else set())
    for name, value in body.items():
        if name not in accepted:
            raise RequestError(f"unknown field {name!r}{nearest(name, known)}", name)
        if name in IGNORED_VALUES and value not in IGNORED_VALUES[name]:
            raise RequestError(f"{name} is {shown(value)}; allowed is {shown(IGNORED_VALUES[name][0])}", name)
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            raise RequestError(f"{name} is not supported by this version; leave it out", name)
    for field in msgspec.structs.fields(struct):
        if field.required and field.name not in body:
            raise RequestError(f"{field.name} is missing", field.name)
    found = convert({name: value for name, value in body.items() if name in own}, struct)
    wanted = SAMPLING_FIELDS - own - UNSUPPORTED.keys()
    return found, {name: value for name, value in body.items() if name in wanted}


def read_json(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    return body


def sampling_params(given: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    """The request's parameters; what it doesn't name is from `defaults`. Raises RequestError."""
    return convert({**defaults, **given}, SamplingParams)


def convert(value: dict[str, Any], struct: type[T]) -> T:
    """Checked types, with JSON's text keys as integers where a field asks for that."""
    try:
        return msgspec.convert(value, struct, str_keys=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, RequestError):
            raise error.__cause__ from None
        raise type_error(str(error)) from None


def type_error(message: str) -> RequestError:
    """A wrong type in our words: `Expected `int`, got `str` - at `$.n`` names field and types, but speaks Python."""
    path = re.search(r"`\$\.?([^`]*)`$", message)
    field = (path[1] if path else "") or None
    match = WRONG_TYPE.search(message)
    if match is None:
        return RequestError(f"{field or 'the body'}: {message.split(' - at ')[0]}", field)
    allowed = " or ".join(JSON_TYPES.get(name, name) for name in match[1].split(" | ") if name != "null")
    got = JSON_TYPES.get(match[2], match[2])
    what = f"a key of {field}" if match[3].startswith("`key`") else field
    return RequestError(f"{what} is {got}; allowed is {allowed}", field)


def check_stream_options(options: StreamOptions | None, *, stream: bool) -> None:
    if options is not None and not stream:
        raise RequestError("stream_options is given; allowed is that only with stream true", "stream_options")


def check_count(name: str, value: int | None, highest: int) -> None:
    """A number of logprobs against the server's limit."""
    if value is not None and not 0 <= value <= highest:
        raise RequestError(f"{name} is {value}; allowed is 0 to {highest}", name)


def nearest(name: str, known: set[str]) -> str:
    close = get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: Any) -> str:
    """A value as JSON, short."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."
