"""`Tokenizer`: a model's vocabulary, special tokens, chat template and generation defaults.

Owns what a model's files say about text: a Hugging Face folder's JSON files or a GGUF file's metadata. Knows nothing about
weights or requests.

    tokenizer = Tokenizer.load(resolve("smollm2-135m"))
    tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from specengine.errors import LoadError, RequestError
from specengine.hub import ResolvedModel
from specengine.quant.gguf_header import read_header
from specengine.tokenizer.chat_template import DEFAULT, ChatTemplates, read_template
from specengine.tokenizer.gguf import PREFIX, backend_from_gguf
from specengine.tokenizer.pieces import PieceBytes

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
GGUF_ENDS = ("eos", "eot", "eom")
NO_TOKEN = "(none)"


@dataclass(frozen=True)
class TokenizerSettings:
    """What stands beside the vocabulary. `named_tokens`: `bos_token` and the like, as text."""

    name: str
    named_tokens: dict[str, str] = field(default_factory=dict)
    eos_token_ids: list[int] = field(default_factory=list)
    templates: dict[str, str] = field(default_factory=dict)
    generation_defaults: dict[str, Any] = field(default_factory=dict)


class Tokenizer:
    """Made by `load`. Text is exact: `decode` never tidies up spaces, whatever `clean_up_tokenization_spaces` says."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings):
        self._backend = backend
        self.name = settings.name
        self._templates = ChatTemplates(settings.templates, settings.named_tokens)
        self.generation_defaults = settings.generation_defaults
        backend.no_truncation()
        backend.no_padding()
        # A token that the model's files name as BOS, EOS and so on is special even where tokenizer.json doesn't mark it.
        added = backend.get_added_tokens_decoder()
        marked = {token.content for token in added.values() if token.special}
        named = [t for t in settings.named_tokens.values() if t not in marked and backend.token_to_id(t) is not None]
        if named:
            backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in named])
            added = backend.get_added_tokens_decoder()
        self.special_token_ids: set[int] = {index for index, token in added.items() if token.special}
        self.num_token_ids: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id: int | None = self._id(settings.named_tokens.get("bos_token"))
        own_eos = self._id(settings.named_tokens.get("eos_token"))
        self.eos_token_ids: list[int] = list(dict.fromkeys(settings.eos_token_ids or ([] if own_eos is None else [own_eos])))
        self._pieces = PieceBytes.of(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, resolved: ResolvedModel, *, chat_template: str | None = None) -> Tokenizer:
        """Reads a model's tokenizer.

        `chat_template` replaces the model's own; it is a template or the name of a file that holds one.
        End-of-sequence ids are those of generation_config.json, else of config.json, else the tokenizer's own.

        Raises:
            LoadError: a file is missing or damaged; the message names it.
            ConfigError: `chat_template` is neither a template nor a file.
        """
        override = None if chat_template is None else {DEFAULT: read_template(chat_template)}
        backend, settings = (_load_gguf if resolved.kind == "gguf" else _load_folder)(resolved, override)
        return cls(backend, settings)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written in `text` become their ids. `add_special_tokens` adds BOS where the model wants it."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeError, TypeError):
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair", "prompt") from None
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text; broken UTF-8 becomes U+FFFD, and ids beyond the vocabulary are left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token's text, its leading space included; U+FFFD for part of a character, "" beyond the vocabulary."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; b"" beyond the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self.piece(token_id)
            if piece is None:
                found = b""
            else:
                found = self._pieces.bytes_of(piece) if self._pieces else self.decode([token_id]).encode()
            self._bytes[token_id] = found
        return found

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's entry as it is stored, None beyond the vocabulary."""
        if not 0 <= token_id < self.num_token_ids:
            return None
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    @property
    def has_token_bytes(self) -> bool:
        """Whether a text is no more than the bytes of its tokens, one after the other."""
        return self._pieces is not None

    @property
    def strips_first_space(self) -> bool:
        return self._pieces is not None and self._pieces.strips_start

    def apply_chat_template(self, messages: list[Any], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt's text (encode it without adding special tokens). `kwargs` are variables of the template, as `tools`.

        Raises RequestError: there is no template, or it refuses the messages; then the message carries its own words.
        """
        return self._templates.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)

    def _id(self, token: str | None) -> int | None:
        index: int | None = None if token is None else self._backend.token_to_id(token)
        return index


def first_difference(target: Tokenizer, draft: Tokenizer) -> tuple[int, str, str] | None:
    """The first id that stands for different text in two vocabularies, with both entries, or None.

    Entries are compared as they are stored, so that two different halves of a character differ; "(none)" is an id that
    one of the two doesn't have.
    """
    for token in range(max(target.num_token_ids, draft.num_token_ids)):
        ours, theirs = target.piece(token), draft.piece(token)
        if ours != theirs:
            return token, NO_TOKEN if ours is None else ours, NO_TOKEN if theirs is None else theirs
    return None


def _load_folder(resolved: ResolvedModel, templates: dict[str, str] | None) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    folder = resolved.path
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise LoadError(f"the folder {folder} has no tokenizer.json; it is the only kind of tokenizer file that can be read")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception
        raise LoadError(f"the tokenizer {file} can't be read: {error}") from None
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    settings = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(_read_json(folder / "special_tokens_map.json") | settings)
    eos = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    found = _folder_templates(folder, settings) if templates is None else templates
    return backend, TokenizerSettings(resolved.name, named, eos, found, _generation_defaults(generation))


def _load_gguf(resolved: ResolvedModel, templates: dict[str, str] | None) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    metadata = read_header(resolved.path).metadata
    backend = backend_from_gguf(metadata, str(resolved.path))
    named = {}
    for name, key in GGUF_NAMES.items():
        token = backend.id_to_token(int(metadata.get(f"{PREFIX}{key}_token_id", len(metadata[PREFIX + "tokens"]))))
        if token is not None:
            named[name] = token
    eos = [int(metadata[key]) for key in (f"{PREFIX}{end}_token_id" for end in GGUF_ENDS) if key in metadata]
    if templates is None:
        key = "tokenizer.chat_template"
        templates = {k.removeprefix(key).lstrip(".") or DEFAULT: v for k, v in metadata.items() if k.startswith(key) and isinstance(v, str)}
    return backend, TokenizerSettings(resolved.name, named, eos, templates)


def _read_json(file: Path) -> dict[str, Any]:
    """An object; empty if there is no such file, since each of the files beside tokenizer.json may be missing."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except ValueError as error:
        raise LoadError(f"{file} is no JSON file: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{file} holds no JSON object")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise LoadError(f"{file} can't be read: {error}") from None


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like: a string, or an object with the string in `content`."""
    found = {}
    for name in NAMED_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _ids(value: Any) -> list[int]:
    """One id, a list of ids or null."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and not isinstance(i, bool) and i >= 0]


def _folder_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """By name: chat_template.jinja goes before tokenizer_config.json, where there may be one or a list of named ones."""
    value = settings.get("chat_template")
    found = {DEFAULT: value} if isinstance(value, str) else {}
    if isinstance(value, list):
        found = {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict) and {"name", "template"} <= entry.keys()}
    files = [(DEFAULT, folder / "chat_template.jinja")]
    files += [(file.stem, file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, file in files:
        if file.is_file():
            found[name] = _read_text(file)
    return found


def _generation_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Sampling values that the model's authors recommend; none if they say that it decodes greedily."""
    if generation.get("do_sample") is False:
        return {}
    return {key: generation[key] for key in GENERATION_KEYS if generation.get(key) is not None}
