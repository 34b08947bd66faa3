"""`PieceBytes`: the bytes that each token stands for, so that text can grow token by token without decoding it again.

Owns the two encodings of bytes in vocabularies: GPT-2's byte-level characters and SentencePiece's `▁` and `<0x0A>`. Knows
nothing about models or files.

    pieces = PieceBytes.of(backend)      # None where the tokenizer decodes in another way
    pieces.bytes_of("Ġthe") == b" the"
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

SPACE = "▁"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_characters() -> dict[str, int]:
    """GPT-2's table: the printable character that stands for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(shifted)): byte for byte in range(256)}


BYTE_OF = byte_characters()


@dataclass(frozen=True)
class PieceBytes:
    """`strips_start`: a text's first space belongs to the encoding and not to the text."""

    kind: Literal["byte_level", "sentencepiece"]
    strips_start: bool = False

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> PieceBytes | None:
        """What the tokenizer's decoder does, or None where it isn't one of the two."""
        if backend.decoder is None:
            return None
        decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls("byte_level")
        if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
            return None
        if steps[0]["pattern"] != {"String": SPACE} or steps[0]["content"] != " ":
            return None
        if kinds[3:] == ["Strip"] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) == (" ", 1, 0):
            return cls("sentencepiece", strips_start=True)
        return cls("sentencepiece") if not kinds[3:] else None

    def bytes_of(self, piece: str) -> bytes:
        """The bytes of one vocabulary entry; they may be a part of a character."""
        if self.kind == "sentencepiece":
            match = BYTE_PIECE.fullmatch(piece)
            return bytes([int(match[1], 16)]) if match else piece.replace(SPACE, " ").encode()
        try:
            return bytes([BYTE_OF[char] for char in piece])
        except KeyError:  # an added token, which stands for itself
            return piece.encode()
