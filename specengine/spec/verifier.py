"""`Verifier`: decides drafted trees with the target's logits; never asks which drafter made them.

Owns the pipeline's per-row state, the choice of the rule by how a tree was selected, log-probabilities, and the check
for non-finite logits, which end one sequence alone. Rows without any logit processing are decided for all trees at once.

    acceptance = verifier.verify(logits, trees, table)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from specengine.core.plan import TokenLogprobs
from specengine.registry import Registry
from specengine.runner.sequence_table import SequenceTable
from specengine.spec.law import Law, log_sum_exp
from specengine.spec.noise import RequestNoise
from specengine.spec.processors import LogitHook, Pipeline
from specengine.spec.rule import ROOT, Decision, Rule
from specengine.spec.types import Floats, Ints
from specengine.tree import DraftTree, Selection, TreeBatch

RULES = Registry("specengine.spec.rules", export="RULE", kind="acceptance rule")


@dataclass
class Acceptance:
    """One entry a tree, in the batch's order."""

    paths: list[list[int]] = field(default_factory=list)  # accepted nodes of each tree, from the root's child down
    token_ids: list[list[int]] = field(default_factory=list)  # their tokens, then the target's one
    logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)  # one a token, where asked for
    errors: list[str | None] = field(default_factory=list)


class NonFiniteLogits(ValueError):
    """The target's logits at a visited node hold NaN or +inf, or nothing but -inf."""


class Verifier:
    """`num_token_ids` counts the tokenizer's ids. `acceptance` names the rule for trees that carry a draft law."""

    def __init__(self, num_token_ids: int, *, acceptance: str = "match", hooks: tuple[LogitHook, ...] = ()):
        self.num_token_ids = num_token_ids
        self.pipeline = Pipeline(num_token_ids, hooks)
        self.sampled_rule: Rule = RULES.get(acceptance)
        self.match: Rule = RULES.get("match")

    def release(self, rows: list[int]) -> None:
        self.pipeline.release(rows)

    def verify(self, logits: torch.Tensor, trees: TreeBatch, table: SequenceTable) -> Acceptance:
        """Decides every tree.

        Args:
            logits: float32 [L, vocab]; of tree r, the root's row is node_start[r] + r and node j's row follows by j + 1.
            trees: R trees over rows of `table`, whose tokens are those before this step.
        """
        plain = [self.pipeline.is_plain_greedy(table, row) for row in trees.rows.tolist()]
        best = self._argmax(logits, trees, plain)
        raw = logits.numpy()
        acceptance = Acceptance()
        for index, row in enumerate(trees.rows.tolist()):
            begin = int(trees.node_start[index]) + index
            try:
                if plain[index]:
                    decision = self._greedy(trees, index, best, begin)
                else:
                    decision = self._by_rule(trees.tree(index), raw[begin:], table, row)
            except NonFiniteLogits as error:
                self._append(acceptance, [], [], None, str(error))
                continue
            first = int(trees.node_start[index])
            tokens = [int(trees.tokens[first + node]) for node in decision.path] + [decision.next_token]
            self._append(acceptance, decision.path, tokens, self._logprobs(raw, begin, decision, tokens, table, row), None)
        return acceptance

    def prompt_logprobs(self, logits: torch.Tensor, next_tokens: Ints, top: int) -> list[TokenLogprobs]:
        """Log-probabilities of `next_tokens` [n] under logits float32 [n, vocab], with the `top` most likely."""
        return [self._token_logprobs(row, int(token), top) for row, token in zip(logits.numpy(), next_tokens, strict=True)]

    def _argmax(self, logits: torch.Tensor, trees: TreeBatch, plain: list[bool]) -> dict[int, int | None]:
        """Row of `logits` -> argmax (lowest id on ties), for all rows of plain trees; None where it is not finite."""
        sizes = np.diff(trees.node_start) + 1
        rows = np.flatnonzero(np.repeat(plain, sizes))
        if not len(rows):
            return {}
        picked = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]
        values, tokens = picked[:, : self.num_token_ids].max(dim=1)
        finite = torch.isfinite(values).tolist()
        return {int(r): token if ok else None for r, token, ok in zip(rows, tokens.tolist(), finite, strict=True)}

    def _greedy(self, trees: TreeBatch, index: int, best: dict[int, int | None], begin: int) -> Decision:
        """`match` without noise over argmaxes that are already known."""
        first, last = int(trees.node_start[index]), int(trees.node_start[index + 1])
        tokens, parents = trees.tokens[first:last].tolist(), trees.parents[first:last].tolist()
        children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        node, path = ROOT, list[int]()
        while True:
            token = best[begin + node + 1]
            if token is None:
                raise NonFiniteLogits("the model's logits are not finite")
            child = children.get((node, token))
            if child is None:
                return Decision(path, token)
            path.append(child)
            node = child

    def _by_rule(self, tree: DraftTree, rows: Floats, table: SequenceTable, row: int) -> Decision:
        rule = self.sampled_rule if tree.selection is Selection.SAMPLED else self.match
        noise = RequestNoise(int(table.seeds[row]), int(table.choices[row]))

        def law_at(node: int) -> Law:
            logits = rows[node + 1]
            top = logits[: self.num_token_ids].max()
            if not np.isfinite(top):
                raise NonFiniteLogits("the model's logits are not finite")
            path = [tree.tokens[ancestor] for ancestor in tree.path(node)]
            law = self.pipeline.law(logits, table, row, path)
            if not len(law.tokens):
                raise NonFiniteLogits("the request's limits leave no token that can follow")
            return law

        return rule.decide(tree, law_at, noise, table.output_index(row))

    def _logprobs(  # noqa: PLR0913
        self, raw: Floats, begin: int, decision: Decision, tokens: list[int], table: SequenceTable, row: int
    ) -> list[TokenLogprobs] | None:
        params = table.sampling[row]
        if params is None or params.logprobs is None:
            return None
        parents = [ROOT, *decision.path]
        return [self._token_logprobs(raw[begin + p + 1], t, params.logprobs) for p, t in zip(parents, tokens, strict=True)]

    def _token_logprobs(self, logits: Floats, token: int, top: int) -> TokenLogprobs:
        """Raw log-probabilities: before bias, penalties, temperature and filters."""
        real = np.ascontiguousarray(logits[: self.num_token_ids])
        logprobs = real - log_sum_exp(real)
        best = top_ids(real, top)
        rank = int((real > real[token]).sum()) + 1
        ids = [token, *best.tolist()]
        return TokenLogprobs(ids, [float(logprobs[i]) for i in ids], [rank, *range(1, len(best) + 1)])

    def _append(  # noqa: PLR0913
        self, acceptance: Acceptance, path: list[int], tokens: list[int], logprobs: list[TokenLogprobs] | None, error: str | None
    ) -> None:
        acceptance.paths.append(path)
        acceptance.token_ids.append(tokens)
        acceptance.logprobs.append(logprobs)
        acceptance.errors.append(error)


def top_ids(values: Floats, count: int) -> Ints:
    """Places of the `count` largest values, best first, the lowest places among equals."""
    if count == 0:
        return np.zeros(0, np.int64)
    count = min(count, len(values))
    bound = np.partition(values, len(values) - count)[len(values) - count]
    likely = np.flatnonzero(values >= bound)
    return likely[np.argsort(-values[likely], kind="stable")[:count]]
