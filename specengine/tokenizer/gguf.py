"""A `tokenizers.Tokenizer` out of a GGUF file's metadata.

Owns what the `tokenizer.ggml.*` keys mean: byte-level BPE (`gpt2`) with its pre-tokenizers by name, and SentencePiece BPE
(`llama`). Knows nothing about tensors.

    backend = backend_from_gguf(header.metadata, "model.gguf")
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specengine.errors import LoadError
from specengine.log import get_logger, warn_once
from specengine.tokenizer.pieces import SPACE

logger = get_logger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # values of tokenizer.ggml.token_type
PREFIX = "tokenizer.ggml."

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS_AND_DIGITS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# How a text is cut before merging, by tokenizer.ggml.pre: each expression cuts what the one before has left.
CUTS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (WORDS_AND_DIGITS % "{1,3}",),
    "qwen2": (WORDS_AND_DIGITS % "",),
}
SAME_AS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "starcoder": "smollm", "deepseek-r1-qwen": "qwen2"}


def backend_from_gguf(metadata: dict[str, Any], where: str) -> Tokenizer:
    """The tokenizer, without padding entries at its end. Raises LoadError naming the file and the key at fault."""
    kind = metadata.get(PREFIX + "model")
    tokens = metadata.get(PREFIX + "tokens")
    if kind not in ("gpt2", "llama") or not isinstance(tokens, list):
        raise LoadError(f"{where} has the tokenizer {kind!r} in {PREFIX}model; supported are 'gpt2' and 'llama', with {PREFIX}tokens")
    types = [int(t) for t in metadata.get(PREFIX + "token_type", [NORMAL] * len(tokens))]
    if len(types) != len(tokens):
        raise LoadError(f"{where} has {len(types)} entries in {PREFIX}token_type for {len(tokens)} tokens")
    while types and types[-1] == UNUSED:  # the converter fills up to the model's vocabulary size
        types.pop()
    tokens = tokens[: len(types)]
    try:
        backend = _byte_level(metadata, tokens, where) if kind == "gpt2" else _sentencepiece(metadata, tokens, types, where)
    except LoadError:
        raise
    except Exception as error:  # the Rust library raises plain Exception for merges outside the vocabulary
        raise LoadError(f"the tokenizer of {where} can't be built: {error}") from None
    backend.add_special_tokens([_added(t, special=True) for t, k in zip(tokens, types, strict=True) if k in (CONTROL, UNKNOWN)])
    backend.add_tokens([_added(t, special=False) for t, k in zip(tokens, types, strict=True) if k == USER_DEFINED])
    _add_ends(backend, metadata, tokens, add_bos=kind == "llama" or _cuts_name(metadata, where) == "llama-bpe")
    return backend


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _cuts_name(metadata: dict[str, Any], where: str) -> str:
    name = metadata.get(PREFIX + "pre")
    if name is None:
        if metadata[PREFIX + "model"] == "gpt2":
            warn_once(
                logger, f"{where} doesn't name its pre-tokenizer ({PREFIX}pre): 'default' is used, and ids may differ from the model's own"
            )
        return "default"
    return SAME_AS.get(str(name), str(name))


def _byte_level(metadata: dict[str, Any], tokens: list[str], where: str) -> Tokenizer:
    name = _cuts_name(metadata, where)
    if name not in CUTS:
        raise LoadError(f"{where} has the pre-tokenizer {name!r}; supported are {', '.join(sorted({*CUTS, *SAME_AS}))}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(PREFIX + "merges", [])]
    # Llama 3 takes a word that is in the vocabulary whole, whatever its merges say.
    backend = Tokenizer(models.BPE(_vocabulary(tokens), merges, fuse_unk=False, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in CUTS[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int], where: str) -> Tokenizer:
    scores = metadata.get(PREFIX + "scores")
    if scores is None or len(scores) < len(tokens):
        raise LoadError(f"{where} has too few entries in {PREFIX}scores for {len(tokens)} tokens")
    vocabulary = _vocabulary(tokens)
    unknown = next((t for t, k in zip(tokens, types, strict=True) if k == UNKNOWN), None)
    merges = _merges(vocabulary, {t: float(s) for t, s, k in zip(tokens, scores, types, strict=False) if k == NORMAL})
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = bool(metadata.get(PREFIX + "add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def _merges(vocabulary: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best; as a merge list: every split of every piece, best first."""
    found = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_ends(backend: Tokenizer, metadata: dict[str, Any], tokens: list[str], *, add_bos: bool) -> None:
    """BOS before and EOS after a text, where the file (or, by default, the kind of tokenizer) asks for them."""
    template: list[str] = ["$A"]
    named: list[tuple[str, int]] = []
    for end, default in (("bos", add_bos), ("eos", False)):
        index = metadata.get(f"{PREFIX}{end}_token_id")
        if index is not None and index < len(tokens) and metadata.get(f"{PREFIX}add_{end}_token", default):
            named.append((tokens[index], int(index)))
            template = [tokens[index], *template] if end == "bos" else [*template, tokens[index]]
    if named:
        backend.post_processor = processors.TemplateProcessing(single=template, pair=None, special_tokens=list(dict.fromkeys(named)))
