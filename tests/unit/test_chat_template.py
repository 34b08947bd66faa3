"""Chat templates: what published ones expect, and how their errors reach the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine.errors import ConfigError, RequestError
from specengine.tokenizer import Tokenizer
from tests import fixtures
from tests.vocabularies import USER, folder_with, load


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(folder_with(tmp_path_factory.mktemp("tok")))


def test_chat_template_of_the_folder(byte_tokenizer: Tokenizer):
    assert byte_tokenizer.apply_chat_template(USER) == "<|user|>Hi<|end|><|assistant|>"
    assert byte_tokenizer.apply_chat_template(USER, add_generation_prompt=False) == "<|user|>Hi<|end|>"


def test_no_chat_template(tmp_path: Path):
    with pytest.raises(RequestError, match="no chat template; give one with --chat-template"):
        load(folder_with(tmp_path, chat_template=None)).apply_chat_template(USER)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "s"}, *USER], "System role not supported"),
        ([*USER, *USER], "roles must alternate user/assistant"),
        ([{"role": "user", "content": None}], "NoneType"),
    ],
)
def test_a_template_that_refuses(tmp_path: Path, messages: list[Any], words: str):
    tokenizer = load(folder_with(tmp_path, chat_template=fixtures.STRICT_TEMPLATE))
    with pytest.raises(RequestError, match=words) as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.param == "messages"


def test_jinja_file_goes_before_the_settings(tmp_path: Path):
    folder = folder_with(tmp_path)
    (folder / "chat_template.jinja").write_text("file: {{ messages[0].content }} {{ bos_token }}")
    assert load(folder).apply_chat_template(USER) == "file: Hi <|bos|>"


def test_named_templates(tmp_path: Path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    folder_with(tmp_path, chat_template=named)  # type: ignore[arg-type]
    tokenizer = load(tmp_path)
    assert tokenizer.apply_chat_template(USER) == tokenizer.apply_chat_template(USER, tools=[]) == "plain"
    assert tokenizer.apply_chat_template(USER, tools=[{}, {}]) == "2 tools"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': '<é&>'} | tojson }}", '{"a": "<é&>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% break %}\n  {% endif %}\n{% endfor %}", "Hi\n"),
        ("{% generation %}x{{ messages[0].content }}{% endgeneration %}", "xHi"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_what_templates_expect(byte_tokenizer: Tokenizer, tmp_path: Path, template: str, text: str):
    tokenizer = load(folder_with(tmp_path), chat_template=template)
    assert tokenizer.apply_chat_template(USER, enable_thinking=False) == text


@pytest.mark.parametrize("template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"])
def test_templates_run_in_a_sandbox(tmp_path: Path, template: str):
    with pytest.raises(RequestError, match="the chat template refused the messages: .*(unsafe|not safe)"):
        load(folder_with(tmp_path), chat_template=template).apply_chat_template(list(USER))


def test_template_option(tmp_path: Path):
    folder_with(tmp_path)
    (tmp_path / "other.jinja").write_text("other {{ messages[0].content }}")
    assert load(tmp_path, chat_template=str(tmp_path / "other.jinja")).apply_chat_template(USER) == "other Hi"
    with pytest.raises(ConfigError, match="'absent.jinja' is neither a template nor a file that can be read: No such file"):
        load(tmp_path, chat_template="absent.jinja")
    with pytest.raises(ConfigError, match="--chat-template has a mistake in line 2: "):
        load(tmp_path, chat_template="{{ a }}\n{% if %}")


def test_a_model_s_own_broken_template_stops_only_chats(tmp_path: Path):
    tokenizer = load(folder_with(tmp_path, chat_template="{% if %}"))
    assert tokenizer.encode("a") == [97]
    with pytest.raises(RequestError, match="the chat template refused"):
        tokenizer.apply_chat_template(USER)
