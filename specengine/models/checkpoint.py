"""Where a checkpoint's tensors come from: safetensors (one file, or shards by an index) or GGUF.

Owns opening files, names, shapes and reading one tensor at a time. Every broken file ends as a LoadError that names it.
Knows nothing about what the tensors are for.

    source = open_checkpoint(resolved)
    source.shapes["model.norm.weight"]; source.read("model.norm.weight")
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from specengine.errors import LoadError
from specengine.hub import ResolvedModel
from specengine.log import get_logger, warn_once
from specengine.models.families import DecoderConfig, config_from_gguf, config_from_hf
from specengine.quant.gguf import decode, encoding_of
from specengine.quant.gguf_header import GGUFHeader, read_header

logger = get_logger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# GGUF's names of what a layer holds, beside Hugging Face's.
GGUF_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"


# What a weight's own type becomes where nothing names a dtype; of quantized GGUF types, bfloat16.
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TYPICAL = "model.layers.0.mlp.down_proj.weight"  # the tensor whose type stands for the whole checkpoint's


class Checkpoint(Protocol):
    """Tensors under Hugging Face's names. `stored_dtype` is how the matrices lie in the file."""

    where: str
    config: DecoderConfig
    shapes: dict[str, tuple[int, ...]]

    @property
    def stored_dtype(self) -> str: ...

    def read(self, name: str) -> torch.Tensor: ...

    def name_in_file(self, name: str) -> str: ...


def open_checkpoint(resolved: ResolvedModel) -> Checkpoint:
    """Opens a model's files. Raises LoadError naming the file or tensor at fault."""
    return GGUFCheckpoint(resolved.path) if resolved.kind == "gguf" else SafetensorsCheckpoint(resolved.path)


class SafetensorsCheckpoint:
    """With an index only the files and tensors that it names are read; others are passed over with one warning."""

    def __init__(self, folder: Path):
        self.where = str(folder)
        config_file = folder / "config.json"
        self.config = config_from_hf(_read_json(config_file), str(config_file))
        self._files: dict[Path, Any] = {}
        self._place = self._places(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, file in self._place.items():
            try:
                self.shapes[name] = tuple(self._open(file).get_slice(name).get_shape())
            except SafetensorError:
                raise LoadError(f"the tensor {name} is missing from {file}, where the index puts it") from None

    @property
    def stored_dtype(self) -> str:
        found: str = self._open(self._place[TYPICAL]).get_slice(TYPICAL).get_dtype()
        return STORED_DTYPES.get(found, found)

    def read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._open(self._place[name]).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"the tensor {name} of {self._place[name]} can't be read: {_first_line(error)}") from None
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            # Quantized values without their scales would load as noise.
            raise LoadError(f"the tensor {name} of {self._place[name]} holds {tensor.dtype}; supported are floats of 16, 32 and 64 bits")
        return tensor

    def name_in_file(self, name: str) -> str:
        return name

    def _places(self, folder: Path) -> dict[str, Path]:
        index = folder / INDEX
        if index.exists():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
                raise LoadError(f"{index} has no weight_map of tensors to files")
            extra = sorted(f.name for f in folder.glob("*.safetensors") if f.name not in set(weight_map.values()))
            if extra:
                warn_once(logger, f"{folder}: files that the index doesn't name are not read: {', '.join(extra)}")
            return {name: folder / file for name, file in weight_map.items()}
        single = folder / SINGLE
        if not single.exists():
            others = [f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth", ".safetensors")]
            found = f"; it holds {', '.join(sorted(others))}" if others else ""
            raise LoadError(f"{folder} has neither {SINGLE} nor {INDEX}{found}")
        return {name: single for name in self._open(single).keys()}

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            if not file.exists():
                raise LoadError(f"the file {file} is missing, and the index names it")
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise LoadError(f"{file} is not a whole safetensors file: {_first_line(error)}") from None
        return self._files[file]


class GGUFCheckpoint:
    def __init__(self, path: Path):
        self.where = str(path)
        self._header: GGUFHeader = read_header(path)
        self._tensors = {self._hf_name(info.name): info for info in self._header.tensors}
        stored = {info.name: tuple(info.shape) for info in self._header.tensors}
        factors = tuple(self._values(ROPE_FACTORS).tolist()) if ROPE_FACTORS in stored else None
        self.config = config_from_gguf(self._header.metadata, stored, self.where, factors)
        self.shapes = {name: tuple(info.shape) for name, info in self._tensors.items() if name != ROPE_FACTORS}
        self._permuted = self._header.metadata.get("general.architecture") in ("llama", "mistral")

    @property
    def stored_dtype(self) -> str:
        return STORED_DTYPES.get(encoding_of(self._tensors[TYPICAL].ggml_type).name, "bfloat16")

    def name_in_file(self, name: str) -> str:
        """The inverse of `_hf_name`, for messages about tensors that aren't there."""
        base, _, kind = name.rpartition(".")
        places = {hf: ggml for ggml, hf in (GGUF_TOP | GGUF_LAYER).items()}
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base)
        return f"blk.{match[1]}.{places[match[2]]}.{kind}" if match else f"{places[base]}.{kind}"

    def read(self, name: str) -> torch.Tensor:
        """float32, whatever the file holds."""
        tensor = torch.from_numpy(self._values(self._tensors[name].name))
        if self._permuted and (match := re.search(r"self_attn\.([qk])_proj\.", name)):
            heads = self.config.num_heads if match[1] == "q" else self.config.num_kv_heads
            tensor = _unpermuted(tensor, heads)
        return tensor

    def _values(self, stored_name: str) -> np.ndarray:
        info = next(t for t in self._header.tensors if t.name == stored_name)
        try:
            encoding = encoding_of(info.ggml_type)
            count = int(np.prod(info.shape))
            size = -(-count // encoding.block_values) * encoding.block_bytes
            begin = self._header.data_start + info.offset
            raw = np.fromfile(self.where, np.uint8, size, offset=begin)
            return decode(raw, encoding, tuple(info.shape))
        except LoadError as error:
            raise LoadError(f"the tensor {stored_name} of {self.where} can't be read: {error}") from None

    def _hf_name(self, name: str) -> str:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
        base, _, kind = name.rpartition(".")
        if base in GGUF_TOP:
            return f"{GGUF_TOP[base]}.{kind}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
        if match and match[2] in GGUF_LAYER:
            return f"model.layers.{match[1]}.{GGUF_LAYER[match[2]]}.{kind}"
        return name


def _unpermuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the halves of every q and k head of this architecture; this puts them back."""
    rest = tensor.shape[1:]
    return tensor.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(tensor.shape).contiguous()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} can't be read: {_first_line(error)}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds no JSON object")
    return value


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
