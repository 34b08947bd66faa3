"""`ChatTemplates`: messages become a prompt by the model's Jinja template, in a sandbox.

Owns the environment that published templates expect (Hugging Face's "Chat templates" page lists it) and how their errors
reach the user. Knows nothing about tokens.

    templates = ChatTemplates({"default": text}, {"bos_token": "<s>"})
    templates.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from specengine.errors import ConfigError, RequestError

DEFAULT, WITH_TOOLS = "default", "tool_use"


class ChatTemplates:
    """`templates` by name: `default`, and in some models `tool_use`; `special_tokens` are variables of every template."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str]):
        self._templates = templates
        self._special_tokens = special_tokens

    @property
    def names(self) -> list[str]:
        return sorted(self._templates)

    def render(self, messages: list[Any], *, add_generation_prompt: bool, **variables: Any) -> str:
        """The prompt's text. Raises RequestError with the template's own words if it refuses the messages."""
        name = WITH_TOOLS if variables.get("tools") and WITH_TOOLS in self._templates else DEFAULT
        if name not in self._templates:
            raise RequestError("the model has no chat template; give one with --chat-template, or send a plain prompt", "messages")
        # Templates test `tools is not none`, so a variable that wasn't given must be none, not undefined.
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return compiled(self._templates[name]).render(messages=messages, add_generation_prompt=add_generation_prompt, **given)
        except Exception as error:  # a template is a program of the model's author: whatever it raises is about these messages
            raise RequestError(f"the chat template refused the messages: {_words(error)}", "messages") from error


def read_template(given: str) -> str:
    """The text of --chat-template, which is a template or the name of a file with one. Raises ConfigError."""
    text = given
    if "{" not in given and "\n" not in given:
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--chat-template {given!r} is neither a template nor a file that can be read: {reason}") from None
    try:
        compiled(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template has a mistake in line {error.lineno}: {error.message}") from None
    return text


@functools.lru_cache(maxsize=32)
def compiled(text: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here its body is just text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not be."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
