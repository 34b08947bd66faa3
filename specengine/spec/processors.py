"""The logit pipeline of one node: from raw logits to the law of its next token.

Owns the order, the same on every path of a tree as in plain decoding: padding ids, logit_bias, allowed_token_ids,
bad_words, min_tokens, hooks (grammars), repetition, frequency and presence penalties, temperature, min_p, top_k, top_p.
Each stateful step sees prompt, output and the path from the root to the node. Knows nothing about how drafts are made.

    law = pipeline.law(logits_row, context, path_tokens)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specengine.runner.sequence_table import SequenceTable
from specengine.sampling_params import SamplingParams
from specengine.spec.law import Law
from specengine.spec.types import Floats, Ints

TOP_P_FIRST = 1024  # top_p nearly always ends among these; sorting them is cheaper than sorting a vocabulary


class LogitHook(Protocol):
    """Masks or changes logits in place before penalties, given the output and path so far (a grammar, say)."""

    def apply(self, logits: Floats, row: int, path: list[int]) -> None: ...


@dataclass
class RowContext:
    """What the pipeline must know of one sequence; counts are brought up to date as the table grows."""

    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    prompt_tokens: frozenset[int] = frozenset()
    output_counts: Counter[int] = field(default_factory=Counter)
    counted: int = 0  # tokens of the table that `output_counts` covers, prompt included


class Pipeline:
    """Contexts by row of the table. `num_token_ids`: ids beyond it are padding and never come out."""

    def __init__(self, num_token_ids: int, hooks: tuple[LogitHook, ...] = ()):
        self.num_token_ids = num_token_ids
        self.hooks = hooks
        self._contexts: dict[int, RowContext] = {}

    def release(self, rows: list[int]) -> None:
        for row in rows:
            self._contexts.pop(row, None)

    def is_plain_greedy(self, table: SequenceTable, row: int) -> bool:
        """Whether the row's next token is the argmax of its raw logits, so that nothing else need be computed."""
        p = table.sampling[row]
        assert p is not None
        changed = p.logit_bias or p.allowed_token_ids or p.bad_words_token_ids or p.min_tokens or p.has_penalties or self.hooks
        return p.is_greedy and not changed

    def law(self, logits: Floats, table: SequenceTable, row: int, path: list[int]) -> Law:
        """The law of the token after `path` (token ids from the root's child on). `logits` float32 [vocab] is not changed.

        Returns a law without tokens where nothing is possible.
        """
        context = self._context(table, row)
        p = context.params
        scores = np.array(logits[: self.num_token_ids], np.float32)
        self._edit(scores, context, table, row, path)
        if p.is_greedy:
            best = scores.argmax()
            return Law(np.array([best]), scores[best : best + 1])
        scores /= np.float32(p.temperature)
        tokens: Ints = np.arange(len(scores))
        if p.min_p > 0:
            tokens = np.flatnonzero(scores >= scores.max() + np.float32(np.log(p.min_p)))
        if 0 < p.top_k < len(tokens):
            tokens = _top_k(scores, tokens, p.top_k)
        if p.top_p < 1:
            tokens = _top_p(scores, tokens, p.top_p)
        kept = scores[tokens] if len(tokens) < len(scores) else scores
        alive = kept > -np.inf
        return Law(tokens, kept) if alive.all() else Law(tokens[alive], kept[alive])

    def _context(self, table: SequenceTable, row: int) -> RowContext:
        context = self._contexts.get(row)
        if context is None:
            params = table.sampling[row]
            assert params is not None
            prompt = table.token_ids[row, : table.num_prompt_tokens[row]]
            seen = frozenset(prompt.tolist()) if params.repetition_penalty != 1 else frozenset()
            context = RowContext(params, table.stop_token_ids[row], seen, counted=int(table.num_prompt_tokens[row]))
            self._contexts[row] = context
        if context.params.has_penalties and context.counted < table.num_tokens[row]:
            context.output_counts.update(table.token_ids[row, context.counted : table.num_tokens[row]].tolist())
            context.counted = int(table.num_tokens[row])
        return context

    def _edit(self, scores: Floats, context: RowContext, table: SequenceTable, row: int, path: list[int]) -> None:
        p = context.params
        if p.logit_bias:
            ids = np.fromiter(p.logit_bias.keys(), np.int64)
            scores[ids] += np.fromiter(p.logit_bias.values(), np.float32)
        if p.allowed_token_ids:
            allowed = np.unique(np.array(p.allowed_token_ids))
            kept = scores[allowed]
            scores.fill(-np.inf)
            scores[allowed] = kept
        if p.bad_words_token_ids:
            _ban_words(scores, p.bad_words_token_ids, table.tokens(row), path)
        if table.output_index(row) + len(path) < p.min_tokens:
            scores[list(context.stop_token_ids)] = -np.inf
        for hook in self.hooks:
            hook.apply(scores, row, path)
        if p.has_penalties:
            _penalise(scores, context, path)


def _ban_words(scores: Floats, words: list[list[int]], tokens: Ints, path: list[int]) -> None:
    """Bans the last token of each word whose beginning stands at the end of the text so far."""
    longest = max(len(word) for word in words) - 1
    tail = tokens[max(0, len(tokens) - longest) :].tolist() + path if longest else []
    for word in words:
        begin = word[:-1]
        if not begin or tail[len(tail) - len(begin) :] == begin:
            scores[word[-1]] = -np.inf


def _penalise(scores: Floats, context: RowContext, path: list[int]) -> None:
    """Repetition over prompt and output (Keskar et al., 1909.05858), then frequency and presence over output, as OpenAI."""
    p = context.params
    counts = context.output_counts + Counter(path) if path else context.output_counts
    if p.repetition_penalty != 1:
        seen = np.fromiter(context.prompt_tokens | counts.keys(), np.int64)
        seen = seen[seen < len(scores)]
        values, penalty = scores[seen], np.float32(p.repetition_penalty)
        scores[seen] = np.where(values > 0, values / penalty, values * penalty)
    if counts and (p.frequency_penalty or p.presence_penalty):
        ids = np.fromiter(counts.keys(), np.int64)
        times = np.fromiter(counts.values(), np.float32)
        scores[ids] -= times * np.float32(p.frequency_penalty) + np.float32(p.presence_penalty)


def _top_k(scores: Floats, tokens: Ints, k: int) -> Ints:
    """The k best of `tokens`, ascending; the lowest ids among equals."""
    values = scores[tokens]
    bound = np.partition(values, len(values) - k)[len(values) - k]
    above = values > bound
    equal = np.flatnonzero(values == bound)[: k - int(above.sum())]
    above[equal] = True
    kept: Ints = tokens[above]
    return kept


def _top_p(scores: Floats, tokens: Ints, p: float) -> Ints:
    """The smallest set of best tokens whose probability reaches p, ascending; the lowest ids among equals."""
    values = scores[tokens]
    weights = np.exp(values - values.max(), dtype=np.float32).astype(np.float64)
    total = weights.sum()
    likely: Ints = np.arange(len(tokens))
    if len(tokens) > 4 * TOP_P_FIRST:
        bound = np.partition(values, len(values) - TOP_P_FIRST)[len(values) - TOP_P_FIRST]
        first = np.flatnonzero(values >= bound)
        if weights[first].sum() >= p * total:
            likely = first
    order = likely[np.argsort(-values[likely], kind="stable")]
    before = np.cumsum(weights[order]) - weights[order]
    return np.sort(tokens[order[before < p * total]])
