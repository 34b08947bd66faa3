"""`SpeculationPolicy`: how much each sequence may draft. Decides from past steps only, never from a drafted token.

Owns what a request may say about its drafts, and the policy of a fixed budget. Knows nothing about drafters: tokens, blocks
and the context's end bound a budget afterwards, in the planner.

    policy = FixedBudget(num_speculative_tokens=8, tree_width=4)
    budgets = policy.budgets(sequences, Load(num_running=2))
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from specengine.core.plan import DraftBudget, StepLimits, StepResult
from specengine.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from specengine.core.sequence import Sequence

MAX_DRAFT_LAG = 32


class RequestSpeculation(msgspec.Struct, frozen=True):
    """A request's own settings; None is the engine's, and no sources are all of the engine's."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    tree_width: int | None = None
    tree_depth: int | None = None
    sources: tuple[str, ...] = ()

    @classmethod
    def parse(cls, value: bool | dict[str, Any] | None) -> RequestSpeculation:
        """From `SamplingParams.speculation`. Raises RequestError naming the key at fault."""
        if value is None or isinstance(value, bool):
            return cls(enabled=False) if value is False else ENGINE_DEFAULT
        known = {"enabled", "method", "num_speculative_tokens", "tree_width", "tree_depth", "sources"}
        for key in value:
            if key not in known:
                close = get_close_matches(str(key), sorted(known), n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"
                raise RequestError(f"unknown speculation key {key!r}; {hint}", "speculation")
        enabled, method = value.get("enabled", True), value.get("method")
        if not isinstance(enabled, bool):
            raise RequestError(f"speculation key 'enabled' is {enabled!r}; allowed is true or false", "speculation")
        if method is not None and not isinstance(method, str):
            raise RequestError(f"speculation key 'method' is {method!r}; allowed is the name of a method", "speculation")
        return cls(
            enabled=enabled and method != "off",
            num_speculative_tokens=_whole(value, "num_speculative_tokens", low=0),
            tree_width=_whole(value, "tree_width", low=1),
            tree_depth=_whole(value, "tree_depth", low=1),
            sources=_sources(value) or ((method,) if method not in (None, "off", "auto") else ()),
        )


ENGINE_DEFAULT = RequestSpeculation()


class Load(msgspec.Struct, frozen=True):
    """What a policy may know about the step that it decides for: the past's queues, no token."""

    num_running: int  # sequences with a row
    num_waiting: int = 0
    num_tokens: int = 0  # chain rows of the step, without drafts, as far as they are planned
    kv_usage: float = 0.0  # share of the blocks in use


class SpeculationPolicy(Protocol):
    def is_on(self, sequence: Sequence, load: Load) -> bool:
        """Whether the sequence drafts at this load at all. A drafter's KV follows only where it does."""
        ...

    def budgets(self, sequences: list[Sequence], load: Load) -> list[DraftBudget]:
        """One budget a sequence, in order; `max_nodes` 0 is no drafting.

        Called for the sequences at their tip, and once more in a step for those that a prompt's last chunk takes there.
        """
        ...

    def limits(self, total_nodes: int) -> StepLimits:
        """Bounds over all trees of the step, whose budgets add up to `total_nodes`."""
        ...

    def observe(self, result: StepResult) -> None:
        """Learns from a step that is over."""
        ...


class FixedBudget:
    """The same budget every step; a request may ask for less than the engine's, which are upper bounds.

    Args:
        num_speculative_tokens: most nodes of a tree, the root not counted; 0 is an engine without drafts.
        tree_width: most children of a node; 1 is a chain.
        tree_depth: most nodes on a path; None is as many as there are nodes.
        max_concurrency: running sequences above which nothing is drafted; None is no such limit.
        max_draft_lag: tokens of KV that a drafter may lack and still draft in the step in which it catches up.

    Raises ConfigError for values out of range.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        tree_width: int = 1,
        tree_depth: int | None = None,
        max_concurrency: int | None = None,
        max_draft_lag: int = MAX_DRAFT_LAG,
    ):
        for name, given, low in (
            ("num_speculative_tokens", num_speculative_tokens, 0),
            ("tree_width", tree_width, 1),
            ("tree_depth", tree_depth, 1),
            ("max_concurrency", max_concurrency, 0),
            ("max_draft_lag", max_draft_lag, 0),
        ):
            if given is not None and given < low:
                raise ConfigError(f"speculation key {name!r} is {given}; allowed is at least {low}")
        self.num_speculative_tokens = num_speculative_tokens
        self.tree_width = tree_width
        self.tree_depth = tree_depth
        self._depth = _at_most(tree_depth, num_speculative_tokens)
        self.max_concurrency = max_concurrency
        self.max_draft_lag = max_draft_lag

    def is_on(self, sequence: Sequence, load: Load) -> bool:
        return not self._is_crowded(load) and self._nodes(sequence.request.speculation or ENGINE_DEFAULT) > 0

    def budgets(self, sequences: list[Sequence], load: Load) -> list[DraftBudget]:
        crowded = self._is_crowded(load)
        return [self._budget(s, off=crowded or s.draft_lag > self.max_draft_lag) for s in sequences]

    def limits(self, total_nodes: int) -> StepLimits:
        return StepLimits(total_nodes)

    def observe(self, result: StepResult) -> None:
        """A fixed budget has nothing to learn."""

    def _nodes(self, own: RequestSpeculation) -> int:
        return _at_most(own.num_speculative_tokens, self.num_speculative_tokens) if own.enabled else 0

    def _is_crowded(self, load: Load) -> bool:
        return self.max_concurrency is not None and load.num_running > self.max_concurrency

    def _budget(self, sequence: Sequence, *, off: bool) -> DraftBudget:
        own = sequence.request.speculation or ENGINE_DEFAULT
        if own is ENGINE_DEFAULT and not off:  # nearly every sequence of every step
            return DraftBudget(sequence.row, self.num_speculative_tokens, self._depth, self.tree_width)
        nodes = 0 if off else self._nodes(own)
        depth = _at_most(own.tree_depth, min(self._depth, nodes))
        return DraftBudget(sequence.row, nodes, depth, _at_most(own.tree_width, self.tree_width), own.sources)


def _at_most(asked: int | None, bound: int) -> int:
    return bound if asked is None else min(asked, bound)


def _whole(given: dict[str, Any], name: str, *, low: int) -> int | None:
    value = given.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise RequestError(f"speculation key {name!r} is {value!r}; allowed is a whole number of at least {low}", "speculation")
    return value


def _sources(given: dict[str, Any]) -> tuple[str, ...]:
    value = given.get("sources") or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise RequestError(f"speculation key 'sources' is {value!r}; allowed is a list of names", "speculation")
    return tuple(value)
