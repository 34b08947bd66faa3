"""Ordinary Hugging Face folders for tests: byte tokenizer, chains with known next-token laws, small random models.

Owns the models that tests load; knows nothing about the engine. Everything is written with numpy, needs no download and
depends only on its arguments.

    write_chain(path, {"a": {"a": 0.5, "b": 0.3, "c": 0.2}}, otherwise={"a": 1.0})
    write_chain(path, spell("A", "BCDEFG"))           # one successor a token, then EOS
    write_rand(path, seed=0, num_hidden_layers=3)     # attention matters here
    write_noisy(other, of=path, scale=0.05)           # a draft that is accepted now and then

The cached helpers (`alphabet`, `three_way`, `rand`, ...) write each model once a process, into a folder that is removed at exit.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS, END = 256, 257, 258
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|pad|>"]  # ids from 256
NUM_TOKENS = 264
VOCAB_SIZE = 320  # ids 264-319 are padding: the model has logits for them, the tokenizer no text
IMPOSSIBLE = -50.0
CHAIN_HIDDEN = 1024  # sqrt is 32: embedding and head rows are scaled without rounding, so logits are the table's to the bit

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Refuses the system role and roles that don't alternate, as some published templates do.
STRICT_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Iterates over the arguments of tool calls, so they must reach it as a mapping.
TOOL_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{{ message['content'] or '' }}"
    "{% for call in message.get('tool_calls') or [] %}{{ call['function']['name'] }}("
    "{% for key, value in call['function']['arguments'].items() %}{{ key }}={{ value | tojson }};{% endfor %}){% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Token = int | str  # an id, or a string of one byte in UTF-8
Law = Token | Mapping[Token, float]  # the only successor, or a probability (or logit) for each next token
Table = Mapping[Token, Law] | Callable[[int], Law]


def token_id(token: Token) -> int:
    """The id of a token named by id, by one ASCII character or by its special name."""
    if isinstance(token, int):
        return token
    if token in SPECIAL_TOKENS:
        return BOS + SPECIAL_TOKENS.index(token)
    encoded = token.encode()
    if len(encoded) != 1:
        raise ValueError(f"{token!r} is not one byte")
    return encoded[0]


def spell(prompt: str, text: str, *, end: Token | None = EOS) -> dict[Token, Law]:
    """Successor map: after the last byte of `prompt` come the bytes of `text`, then `end` (None: back to the first byte of `text`).

    Each byte of `prompt[-1] + text` must occur once.
    """
    chain: list[int] = [prompt.encode()[-1], *text.encode()]
    if len(set(chain)) != len(chain):
        raise ValueError(f"a byte occurs twice in {prompt[-1] + text!r}")
    successors = dict(zip(chain, chain[1:], strict=False))
    successors[chain[-1]] = chain[1] if end is None else token_id(end)
    return dict(successors)


def write_tokenizer(
    path: str | Path,
    *,
    add_bos: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    eos_token: str | None = "<|eos|>",
    bos: bool = True,
) -> None:
    """TOK: ids 0-255 are the bytes, then SPECIAL_TOKENS; 264 entries. `add_bos` puts BOS before each prompt, `bos=False` names none."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE({char: byte for byte, char in enumerate(byte_characters())}, [], fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<|bos|> $A", "<|bos|> $A $B", [("<|bos|>", BOS)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "pad_token": "<|pad|>",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    if bos:
        settings["bos_token"] = "<|bos|>"
    if chat_template is not None:
        settings["chat_template"] = chat_template
    write_json(path / "tokenizer_config.json", settings)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def base_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    """config.json of a small model of that family."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    if architecture == "LlamaForCausalLM":
        config |= {"attention_bias": False, "mlp_bias": False}
    if architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    if architecture == "Qwen2ForCausalLM":
        config |= {"use_sliding_window": False, "sliding_window": None}
    return config | overrides


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint with that config, the tied head left out."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, (config["num_key_value_heads"] or config["num_attention_heads"]) * head_dim
    family = config["architectures"][0]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    linears = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    mlps = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    biased = {"q_proj", "k_proj", "v_proj"} if family == "Qwen2ForCausalLM" else set()
    biased |= set(linears) if config.get("attention_bias") else set()
    biased |= set(mlps) if config.get("mlp_bias") else set()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + "input_layernorm.weight": (hidden,), prefix + "post_attention_layernorm.weight": (hidden,)}
        for block, group in (("self_attn.", linears), ("mlp.", mlps)):
            for name, shape in group.items():
                shapes[f"{prefix}{block}{name}.weight"] = shape
                if name in biased:
                    shapes[f"{prefix}{block}{name}.bias"] = shape[:1]
        if family == "Qwen3ForCausalLM":
            shapes |= {prefix + "self_attn.q_norm.weight": (head_dim,), prefix + "self_attn.k_norm.weight": (head_dim,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Weights of unit gain (head: gain 3), so that attention matters and greedy choices are rarely close."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = generator.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.endswith(".bias"):
            values = 0.5 * values
        elif name == "model.embed_tokens.weight":
            values = values * np.float32(3 / math.sqrt(shape[1]) if config.get("tie_word_embeddings") else 1)
        else:
            values = values * np.float32((3 if name == "lm_head.weight" else 1) / math.sqrt(shape[1]))
        tensors[name] = values.astype(np.float32)
    return tensors


def write_model(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    shards: int = 1,
    generation_config: Mapping[str, Any] | None = None,
    **tokenizer_options: Any,
) -> Path:
    """A whole folder: config, weights (several files with an index when `shards` > 1), tokenizer, generation config."""
    path = Path(path)
    write_tokenizer(path, **tokenizer_options)
    write_json(path / "config.json", config)
    default = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": config.get("eos_token_id")}
    write_json(path / "generation_config.json", default if generation_config is None else generation_config)
    names = sorted(tensors)
    if shards == 1:
        save_file(dict(tensors), str(path / "model.safetensors"), metadata={"format": "pt"})
        return path
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, str(path / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})
    return path


def write_chain(
    path: str | Path,
    law: Table,
    *,
    logits: bool = False,
    otherwise: Law = EOS,
    vocab_size: int = VOCAB_SIZE,
    config: Mapping[str, Any] | None = None,
    **folder_options: Any,
) -> Path:
    """CHAIN: a Llama whose next-token law depends on the last token alone and is exactly `law`.

    `law` gives for a token its only successor, or {next: probability} ({next: logit} with `logits=True`); tokens that it
    leaves out follow `otherwise`. Everything not named has logit -50. Further options: those of `write_model`.
    """
    table = np.full((vocab_size, vocab_size), IMPOSSIBLE, np.float32)  # [last, next]
    rows = law if callable(law) else {token_id(token): value for token, value in law.items()}
    for token in range(vocab_size):
        value = rows(token) if callable(rows) else rows.get(token, otherwise)
        for following, weight in _law_items(value, logits):
            table[token, following] = weight
    settings = base_config(
        vocab_size=vocab_size, hidden_size=CHAIN_HIDDEN, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-12, max_position_embeddings=8192,
    ) | dict(config or {})  # fmt: skip
    tensors = random_tensors(settings, seed=0)
    scale = np.float32(math.sqrt(CHAIN_HIDDEN))
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = np.ones_like(tensors[name])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    tensors["model.embed_tokens.weight"] = np.eye(vocab_size, CHAIN_HIDDEN, dtype=np.float32) * scale
    head = np.zeros((vocab_size, CHAIN_HIDDEN), np.float32)
    head[:, :vocab_size] = table.T / scale
    tensors["lm_head.weight"] = head
    return write_model(path, settings, tensors, **folder_options)


def _law_items(law: Law, logits: bool) -> Iterable[tuple[int, float]]:
    if not isinstance(law, Mapping):
        return [(token_id(law), 0.0)]
    if logits:
        return [(token_id(token), value) for token, value in law.items()]
    return [(token_id(token), math.log(value)) for token, value in law.items() if value > 0]


def write_rand(
    path: str | Path,
    seed: int = 0,
    *,
    architecture: str = "LlamaForCausalLM",
    folder: Mapping[str, Any] | None = None,
    **config_overrides: Any,
) -> Path:
    """RAND: a small random model. `folder` holds options of `write_model`; the rest changes config.json."""
    config = base_config(architecture, **config_overrides)
    return write_model(path, config, random_tensors(config, seed), **dict(folder or {}))


def write_same(path: str | Path, of: str | Path) -> Path:
    """SAME: a copy of the folder `of`."""
    shutil.copytree(of, path, dirs_exist_ok=True)
    return Path(path)


def write_noisy(path: str | Path, of: str | Path, scale: float = 0.05, seed: int = 1, vocab_size: int | None = None) -> Path:
    """NOISY: `of` with relative Gaussian noise of that scale on every matrix; another `vocab_size` cuts or extends the padding."""
    path = write_same(path, of)
    config = json.loads((path / "config.json").read_text())
    generator = np.random.default_rng(seed)
    tensors = load_file(str(path / "model.safetensors"))
    for name in sorted(tensors):
        values = tensors[name]
        if values.ndim == 2:
            deviation = np.float32(scale * values.std())
            values = values + deviation * generator.standard_normal(values.shape, dtype=np.float32)
        if vocab_size is not None and name in ("model.embed_tokens.weight", "lm_head.weight"):
            values = np.resize(values, (vocab_size, values.shape[1]))
        tensors[name] = np.ascontiguousarray(values)
    if vocab_size is not None:
        config["vocab_size"] = vocab_size
        write_json(path / "config.json", config)
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def write_foreign(path: str | Path, seed: int = 1000, **config_overrides: Any) -> Path:
    """FOREIGN: RAND with other weights: its greedy choice is almost never the target's."""
    return write_rand(path, seed, **config_overrides)


@functools.cache
def _session_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="specengine-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _new_folder(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=name + "-", dir=_session_folder()))


@functools.cache
def alphabet() -> Path:
    """a->b->...->z->EOS and A->B->...->Z->EOS."""
    letters: dict[Token, Law] = {}
    for first in "aA":
        text = "".join(chr(ord(first) + i) for i in range(1, 26))
        letters |= spell(first, text)
    return write_chain(_new_folder("alphabet"), letters)


@functools.cache
def three_way() -> Path:
    """P(a) = 0.5, P(b) = 0.3, P(c) = 0.2 after every token."""
    return write_chain(_new_folder("three-way"), {}, otherwise={"a": 0.5, "b": 0.3, "c": 0.2})


@functools.cache
def chain(successors: tuple[tuple[Token, Token], ...]) -> Path:
    """CHAIN(f) for the pairs (token, successor); other tokens are followed by EOS."""
    return write_chain(_new_folder("chain"), dict(successors))


@functools.cache
def rand(seed: int = 0, **config_overrides: Any) -> Path:
    """RAND (values of `config_overrides` must be hashable)."""
    return write_rand(_new_folder("rand"), seed, **config_overrides)


@functools.cache
def noisy(seed: int = 0, scale: float = 0.05, vocab_size: int | None = None) -> Path:
    """A draft for `rand(seed)` that agrees with it on part of the tokens."""
    return write_noisy(_new_folder("noisy"), rand(seed), scale, seed + 1, vocab_size)


@functools.cache
def same(seed: int = 0) -> Path:
    """A copy of `rand(seed)`."""
    return write_same(_new_folder("same"), rand(seed))


@functools.cache
def foreign(seed: int = 0) -> Path:
    """A draft for `rand(seed)` that agrees with it almost never."""
    return write_foreign(_new_folder("foreign"), seed + 1000)
