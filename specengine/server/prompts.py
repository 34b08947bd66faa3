"""Prompts: the forms that a completion's `prompt` may have, and a conversation through the chat template.

Owns how both become token ids. Knows nothing about sampling or answers.

    prompts = await completion_prompts(llm, ["a", "b"], add_special_tokens=True)
    prompt = await chat_prompt(llm, messages, add_generation_prompt=True)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from specengine.engine.async_llm import AsyncLLM
from specengine.errors import RequestError

FORMS = "text, a list of texts, a list of token ids, or a list of lists of token ids"
RENAMED_ROLES = {"developer": "system"}  # OpenAI's newer name for the same thing


@dataclass(frozen=True)
class Prompt:
    """`text` is None where the request gave token ids."""

    text: str | None
    token_ids: list[int]


async def completion_prompts(llm: AsyncLLM, given: Any, *, add_special_tokens: bool) -> list[Prompt]:
    """Every prompt of a request, in order. Raises RequestError."""
    listed = [given] if isinstance(given, str) or _is_ids(given) else given
    if not isinstance(listed, list):
        raise RequestError(f"prompt is of the wrong type; allowed is {FORMS}", "prompt")
    if not listed:
        raise RequestError("prompt is empty; allowed is at least one token", "prompt")
    prompts = []
    for place, entry in enumerate(listed):
        if isinstance(entry, str):
            prompts.append(Prompt(entry, await llm.encode(entry, add_special_tokens=add_special_tokens)))
        elif isinstance(entry, list) and all(_is_id(token) for token in entry):
            prompts.append(Prompt(None, entry))
        else:
            raise RequestError(f"prompt[{place}] is of the wrong type; allowed is {FORMS}", "prompt")
        if not prompts[-1].token_ids:
            raise RequestError("prompt is empty; allowed is at least one token", "prompt")
    if len({prompt.text is None for prompt in prompts}) > 1:
        raise RequestError(f"prompt mixes texts and token ids; allowed is {FORMS}", "prompt")
    return prompts


async def chat_prompt(llm: AsyncLLM, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> Prompt:
    """A conversation as the model's template writes it. Raises RequestError, with the template's own words if it refuses."""
    if not messages:
        raise RequestError("messages is empty; allowed is at least one message", "messages")
    clash = {"messages", "add_generation_prompt"} & variables.keys()
    if clash:
        raise RequestError(f"chat_template_kwargs names {clash.pop()!r}, which is a field of its own", "chat_template_kwargs")
    checked = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    text = llm.tokenizer.apply_chat_template(checked, add_generation_prompt, **variables)
    return Prompt(text, await llm.encode(text, add_special_tokens=False))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(_is_id(token) for token in value)


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message as templates expect it: content is text, arguments of calls are mappings; other fields are the template's."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is missing; allowed is a role such as user, assistant or system", f"{where}.role")
    found = {name: value for name, value in message.items() if value is not None and value != []}
    found["role"] = RENAMED_ROLES.get(role, role)
    calls = found.get("tool_calls")
    if calls is not None:
        found["tool_calls"] = _calls(calls, where)
    content = message.get("content")
    if content is None and calls is None:
        raise RequestError(f"{where}.content is missing; allowed is text, or a list of text parts", f"{where}.content")
    found["content"] = None if content is None else _content(content, f"{where}.content")
    return found


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} is of the wrong type; allowed is text, or a list of text parts", where)
    if not content:
        raise RequestError(f"{where} is empty; allowed is text, or a list of text parts", where)
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(f"{where}[{place}].type is {kind!r}; allowed is 'text'", f"{where}[{place}].type")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{place}].text is missing", f"{where}[{place}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls is of the wrong type; allowed is a list", f"{where}.tool_calls")
    found = []
    for place, call in enumerate(calls):
        field = f"{where}.tool_calls[{place}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{field}.name is missing", f"{field}.name")
        found.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"), f"{field}.arguments")}})
    return found


def _arguments(given: Any, where: str) -> dict[str, Any]:
    """Clients send a call's arguments as JSON text; templates iterate over them."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else {}
        except ValueError as error:
            raise RequestError(f"{where} is not valid JSON: {error}", where) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{where} is {type(value).__name__}; allowed is a JSON object, as text", where)
    return value
