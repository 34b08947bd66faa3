"""Where an output ends: `TextStop` finds stop strings as text grows, and holds back what may become one.

Owns the search only; which token ends a request by its id is decided in `output_processor.py`. The search starts at a
block's first new character (a match early in a long accepted block must be seen), so tokens are fed one at a time.

    stop = TextStop(("DEF",), include=False)
    stop.feed("ABCD")   # -> None; stop.take() == "ABC"
    stop.feed("EF")     # -> "DEF"; stop.take() == ""
"""

from __future__ import annotations


class TextStop:
    """Collects an output's text. `feed` returns the stop string that a piece completes, or None."""

    def __init__(self, strings: tuple[str, ...], *, include: bool):
        self.strings = strings
        self.include = include
        self.text = ""
        self._sent = 0  # characters of `text` already taken
        self._longest = max(map(len, strings), default=0)

    def feed(self, piece: str, *, search: bool = True) -> str | None:
        """Adds text; cuts it at the earliest stop string. `search` False: too early to stop (min_tokens)."""
        begin = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        if not self.strings or not piece or not search:
            return None
        found = [(at, string) for string in self.strings if (at := self.text.find(string, begin)) >= 0]
        if not found:
            return None
        at, string = min(found, key=lambda hit: hit[0])
        self.text = self.text[: at + len(string) if self.include else at]
        return string

    def take(self, *, final: bool = False) -> str:
        """Text that can be sent now: all of it at the end, otherwise not what a stop string may still swallow."""
        end = len(self.text) if final else len(self.text) - self._held()
        piece = self.text[self._sent : end] if end > self._sent else ""
        self._sent = max(self._sent, end)
        return piece

    def _held(self) -> int:
        """Length of the longest end of the text that begins some stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[len(self.text) - length :]
            if any(string.startswith(tail) for string in self.strings):
                return length
        return 0
