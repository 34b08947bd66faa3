"""Every engine and server option: its name, type, default and allowed values, checked where it enters.

Owns the option tables (`EngineOptions`, `ServerOptions`) that the command line, Python and YAML files share, and the
speculation settings (`SpeculativeConfig`). Environment variables are read here and in `hub.py` only. Knows nothing
about models: what depends on a model's size is resolved by the engine when it loads.

    options = EngineOptions.create(target="smollm2-135m", kv_cache_memory="4GiB")
    options.speculative.method
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from specengine.errors import ConfigError

GIB = 1 << 30
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
DTYPES = {
    "auto": "auto", "float32": "float32", "fp32": "float32", "f32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "f16": "float16",
}  # fmt: skip
METHODS = ("auto", "off", "ngram", "draft")
ACCEPTANCE = ("auto", "match", "rejection")
METHOD_ALIASES = {"draft_model": "draft", "none": "off", "prompt_lookup": "ngram"}
# vLLM's and older spellings of the keys of a speculation object.
SPECULATION_ALIASES = {
    "model": "draft", "draft_model": "draft", "disable_by_batch_size": "max_concurrency", "rejection_sample_method": "acceptance",
    "acceptance_method": "acceptance",
}  # fmt: skip

T = TypeVar("T")


def option(default: Any, text: str, **about: Any) -> Any:
    """A dataclass field with what the command line and the docs need: help, choices, kind, bounds."""
    return field(default=default, metadata={"help": text, **about})


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made and accepted; the keys of `--speculation JSON`.

    `num_speculative_tokens` counts drafted nodes, not the root. `max_concurrency` turns speculation off above that many
    running sequences. Raises ConfigError naming the key at fault.
    """

    method: str = "auto"
    draft: str | None = None
    num_speculative_tokens: int = 8
    tree_width: int = 4
    tree_depth: int | None = None
    acceptance: str = "auto"
    max_concurrency: int | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        _choice("method", self.method, METHODS)
        _choice("acceptance", self.acceptance, ACCEPTANCE)
        _whole("num_speculative_tokens", self.num_speculative_tokens, low=0, high=256)
        _whole("tree_width", self.tree_width, low=1, high=64)
        for name in ("tree_depth", "max_concurrency"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), low=1)
        _whole("prompt_lookup_min", self.prompt_lookup_min, low=1)
        _whole("prompt_lookup_max", self.prompt_lookup_max, low=self.prompt_lookup_min, high=64)
        if self.method == "draft" and not self.draft:
            raise ConfigError("speculation method 'draft' needs a draft model: give --draft MODEL or the key \"draft\"")

    @classmethod
    def parse(cls, value: Any) -> SpeculativeConfig:
        """From a method's name, a JSON object as text, a dict, None or False."""
        if isinstance(value, cls):
            return value
        if value is None or value is True:
            return cls()
        if value is False:
            return cls(method="off")
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"--speculation is not valid JSON: {error}") from None
        if isinstance(value, str):
            value = {"method": value}
        if not isinstance(value, dict):
            raise ConfigError(f"--speculation is {value!r}; allowed is {', '.join(METHODS)} or a JSON object")
        return cls(**speculation_keys(value))

    def resolved_method(self) -> str:
        """`auto` is the draft model where one is given, otherwise n-gram lookup."""
        if self.num_speculative_tokens == 0:
            return "off"
        if self.method != "auto":
            return self.method
        return "draft" if self.draft else "ngram"

    def resolved_acceptance(self) -> str:
        return "match" if self.acceptance == "auto" else self.acceptance


def speculation_keys(given: dict[str, Any]) -> dict[str, Any]:
    """The keys of a speculation object under our names, aliases resolved; unknown keys raise ConfigError."""
    known = {f.name for f in fields(SpeculativeConfig)}
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = SPECULATION_ALIASES.get(key, key)
        if name == "enabled":
            if not value:
                found["method"] = "off"
            continue
        if name not in known:
            raise ConfigError(f"unknown speculation key {key!r}{_nearest(key, known | set(SPECULATION_ALIASES))}")
        found[name] = METHOD_ALIASES.get(value, value) if name == "method" else value
    return found


@dataclass(frozen=True)
class EngineOptions:
    """What `LLM(...)`, `specengine serve` and `specengine generate` take. Build with `create`, which checks every value."""

    target: str = option("smollm2-135m", "target model: a folder, a .gguf file, a hub id or an alias")
    draft: str | None = option(None, "draft model, with the target's vocabulary")
    device: str = option("auto", "where the models run", choices=("auto", "cpu"))
    dtype: str = option("auto", "dtype of the weights; auto is the checkpoint's", kind="dtype")
    quantization: str = option("auto", "weight quantization; GGUF weights are decoded to --dtype", choices=("auto", "none"))
    kv_cache_dtype: str = option("auto", "dtype of the KV cache; auto is the weights'", kind="dtype")
    max_model_len: int | None = option(None, "longest prompt plus output, in tokens; default: the model's own", low=1)
    max_num_seqs: int = option(64, "most sequences in a step", low=1, high=4096)
    max_num_batched_tokens: int = option(2048, "most tokens in a step: prefill chunks and verification together", low=1)
    block_size: int = option(16, "tokens in a KV block", low=1, high=256)
    kv_cache_memory: int | None = option(None, "KV memory, target and draft together: bytes or like 4GiB; default 4GiB", kind="bytes")
    num_kv_blocks: int | None = option(None, "KV blocks, instead of --kv-cache-memory", low=2)
    enable_prefix_caching: bool = option(True, "reuse KV blocks of equal prefixes", kind="flag")
    scheduling_policy: str = option("fcfs", "order of waiting requests", choices=("fcfs", "priority"))
    tensor_parallel_size: int = option(1, "devices that share the target", choices=(1,))
    executor: str = option("uni", "where the worker runs", choices=("uni",))
    threads: int | None = option(None, "CPU threads; default: the cores available", low=1, high=1024)
    attention: str = option("auto", "attention backend", choices=("auto", "paged"))
    seed: int | None = option(None, "seed of requests that name none; default: drawn at start", low=0)
    generation_config: str = option("auto", "sampling defaults from generation_config.json", choices=("auto", "none"))
    speculation: Any = option("auto", "auto, off, ngram, draft, or a JSON object", kind="speculation")
    num_speculative_tokens: int | None = option(None, "most nodes that a step verifies for a sequence (8)", low=0, high=256)
    tree_width: int | None = option(None, "most children of a tree node (4); 1 is a chain", low=1, high=64)
    acceptance: str | None = option(None, "rule of acceptance", choices=ACCEPTANCE)
    chat_template: str | None = option(None, "a chat template, or a file that holds one")
    trust_remote_code: bool = option(False, "refused when set: no code from a model's folder is ever run", kind="flag")

    @classmethod
    def create(cls, **given: Any) -> EngineOptions:
        """Checked options from keyword arguments; `model` is the same as `target`."""
        given = _rename(given, {"model": "target", "speculative_config": "speculation"})
        options = cls(**_checked(cls, given))
        options.speculative  # noqa: B018  its checks run here
        if options.trust_remote_code:
            raise ConfigError("--trust-remote-code is set; allowed is off, since specengine runs no code from a model's folder")
        if options.num_kv_blocks is not None and options.kv_cache_memory is not None:
            raise ConfigError("--num-kv-blocks and --kv-cache-memory are both given; allowed is one of them")
        return options

    @property
    def speculative(self) -> SpeculativeConfig:
        """The speculation settings, shortcuts and `--draft` included."""
        base = SpeculativeConfig.parse(_prepared_speculation(self.speculation, self.draft))
        changes = {
            name: getattr(self, name) for name in ("num_speculative_tokens", "tree_width", "acceptance") if getattr(self, name) is not None
        }
        return SpeculativeConfig(**{**base.__dict__, **changes})


@dataclass(frozen=True)
class ServerOptions:
    """What `specengine serve` takes beside the engine's options."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on", low=0, high=65535)
    uds: str | None = option(None, "a Unix socket's path, instead of host and port")
    api_key: tuple[str, ...] = option((), "key that clients must send; repeatable; or SPECENGINE_API_KEY", kind="list")
    ssl_keyfile: str | None = option(None, "TLS key file")
    ssl_certfile: str | None = option(None, "TLS certificate file")
    cors_origin: tuple[str, ...] = option((), "origin allowed to call from a browser; repeatable", kind="list")
    served_model_name: str | None = option(None, "the model's name in the API; default: as --target names it")
    max_queued_requests: int | None = option(None, "waiting requests beyond which new ones get 503", low=1)
    request_timeout: float | None = option(None, "seconds after which a request is aborted", low=0)
    max_logprobs: int = option(20, "most logprobs that a request may ask for", low=0)
    shutdown_timeout: float = option(10.0, "seconds of grace for running requests at shutdown", low=0)
    log_level: str = option("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    log_requests: bool = option(False, "log prompts; off, since they are private", kind="flag")

    @classmethod
    def create(cls, **given: Any) -> ServerOptions:
        checked = _checked(cls, given)
        if not checked.get("api_key") and os.environ.get("SPECENGINE_API_KEY"):
            checked["api_key"] = (os.environ["SPECENGINE_API_KEY"],)
        options = cls(**checked)
        if (options.ssl_keyfile is None) != (options.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together; one of them is missing")
        return options


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def load_yaml(path: str) -> dict[str, Any]:
    """Options from a `--config` file: a mapping of option names (dashes or underscores) to values."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} holds no mapping of option names to values")
    return {str(key).lstrip("-").replace("-", "_"): value for key, value in values.items()}


def parse_bytes(value: Any, name: str = "--kv-cache-memory") -> int:
    """Bytes from an integer or text such as `4GiB`, `512MB`."""
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if not match or match[2].upper() not in UNITS:
            raise ConfigError(f"{name} is {value!r}; allowed is a number of bytes, or one with a unit such as 4GiB or 512MB")
        amount = int(float(match[1]) * UNITS[match[2].upper()])
    if amount <= 0:
        raise ConfigError(f"{name} is {value!r}; allowed is more than 0 bytes")
    return amount


def default_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepared_speculation(value: Any, draft: str | None) -> Any:
    if draft is None:
        return value
    if isinstance(value, SpeculativeConfig):
        return SpeculativeConfig(**{**value.__dict__, "draft": draft})
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"--speculation is not valid JSON: {error}") from None
    if value is None or value is True:
        value = {}
    if value is False:
        return {"method": "off", "draft": draft}
    if isinstance(value, str):
        value = {"method": value}
    if not isinstance(value, dict):
        return value
    return {**value, "draft": value.get("draft", value.get("model", draft))}


def _rename(given: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    renamed = dict(given)
    for old, new in names.items():
        if old in renamed:
            value = renamed.pop(old)
            if new in renamed and renamed[new] != value:
                raise ConfigError(f"{flag_name(old)} and {flag_name(new)} are the same option, and both are given")
            renamed[new] = value
    return renamed


def _checked(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    known = {f.name: f for f in fields(cls)}
    checked = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"unknown option {flag_name(name)}{_nearest(name, set(known))}")
        checked[name] = _checked_value(known[name], value)
    return checked


def _checked_value(about: Field[Any], value: Any) -> Any:
    name, meta = flag_name(about.name), about.metadata
    if value is None and about.default is None:
        return None
    kind = meta.get("kind") or _kind_of(about)
    value = _converted(name, kind, value)
    if "choices" in meta and value not in meta["choices"]:
        raise ConfigError(f"{name} is {value!r}; allowed is {', '.join(str(c) for c in meta['choices'])}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = meta.get("low", -math.inf), meta.get("high", math.inf)
        if not low <= value <= high:
            allowed = f"at least {low}" if high == math.inf else f"{low} to {high}"
            raise ConfigError(f"{name} is {value}; allowed is {allowed}")
    return value


def _kind_of(about: Field[Any]) -> str:
    text = str(about.type)
    return "int" if text.startswith("int") else "float" if text.startswith("float") else "str"


def _converted(name: str, kind: str, value: Any) -> Any:
    return CONVERTERS[kind](name, value)


def _dtype(name: str, value: Any) -> str:
    spelled = str(value).removeprefix("torch.")
    if spelled not in DTYPES:
        raise ConfigError(f"{name} is {value!r}; allowed is {', '.join(DTYPES)}")
    return DTYPES[spelled]


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; allowed is true or false")
    return value


def _int(name: str, value: Any) -> int:
    fraction = isinstance(value, float) and not value.is_integer()  # infinity and NaN are no integers either
    try:
        if isinstance(value, bool) or fraction:
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {value!r}; allowed is a whole number") from None


def _float(name: str, value: Any) -> float:
    try:
        converted = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        converted = math.nan
    if not math.isfinite(converted):
        raise ConfigError(f"{name} is {value!r}; allowed is a finite number")
    return converted


def _text(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ConfigError(f"{name} is {value!r}; allowed is text of at least one character")
    return str(value)


CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "bytes": lambda name, value: parse_bytes(value, name),
    "dtype": _dtype,
    "flag": _flag,
    "list": lambda name, value: (value,) if isinstance(value, str) else tuple(value),
    "speculation": lambda name, value: value,  # checked as a whole by SpeculativeConfig
    "int": _int,
    "float": _float,
    "str": _text,
}


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"speculation key {name!r} is {value!r}; allowed is {', '.join(allowed)}")


def _whole(name: str, value: Any, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        raise ConfigError(f"speculation key {name!r} is {value!r}; allowed is {allowed}")


def _nearest(name: str, known: set[str]) -> str:
    close = get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"
