"""`draft`: a smaller model with the target's vocabulary proposes chains and best-first trees.

Owns the draft's KV bookkeeping: how many tokens of each row it has seen, which blocks hold valid KV of its own, and how
its nodes are numbered. All sequences draft together, one forward pass a level. Under temperature it ranks tokens by its
own law plus the target's noise, so that its first choice is likely the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specengine.core.plan import DraftBudget, StepPlan
from specengine.errors import ConfigError
from specengine.runner.batch_builder import Segment, build_token_batch
from specengine.runner.sequence_table import SequenceTable
from specengine.spec.coupling import CouplingModel, gaps_of
from specengine.spec.draft_kv import DraftKV
from specengine.spec.drafter import Capabilities, DrafterContext, Proposed, tip_rows
from specengine.spec.law import log_sum_exp
from specengine.spec.noise import RequestNoise, Stream, perturbed_top
from specengine.spec.processors import Pipeline
from specengine.spec.rule import ROOT
from specengine.spec.tree_growth import TreeGrowth
from specengine.spec.types import Floats
from specengine.spec.verifier import Acceptance, top_ids
from specengine.tree import DraftTree, TreeBatch

SOURCE = "draft"


@dataclass
class Drafting:
    """A row's tree under construction, and the candidates whose logits the next forward pass gives."""

    row: int
    growth: TreeGrowth
    frontier: list[int]


class DraftModelDrafter:
    capabilities = Capabilities(max_width=64, has_kv=True, reports_probs=True)

    def __init__(self, context: DrafterContext):
        if context.runner is None:
            raise ConfigError("speculation method 'draft' needs a draft model: give --draft MODEL")
        self.runner = context.runner
        self.num_token_ids = min(context.num_token_ids, self.runner.model.config.vocab_size)
        self.target_ids = context.num_token_ids
        self.pipeline = Pipeline(self.num_token_ids)
        self.kv = DraftKV(self.runner.kv_cache, context.max_rows, context.num_blocks)
        self.coupling = CouplingModel()
        self.samples_law = context.speculative.resolved_acceptance() == "rejection"
        self._grown: dict[int, tuple[TreeGrowth, list[int]]] = {}  # row -> growth, candidates in the tree's order

    def begin(self, table: SequenceTable, plan: StepPlan) -> Proposed:
        self.kv.apply(plan)
        self._grown.clear()
        budgets = {b.row: b for b in plan.budgets}
        active = self._catch_up(table, plan, budgets)
        while active:
            active = self._level(table, active)
        return Proposed(TreeBatch.from_trees([(row, self._tree(row)) for row in tip_rows(plan)]))

    def observe(self, table: SequenceTable, trees: TreeBatch, acceptance: Acceptance) -> dict[int, int]:
        for index, row in enumerate(trees.rows.tolist()):
            growth, order = self._grown.get(row, (None, []))
            if growth is None:
                continue
            path = [order[node] for node in acceptance.paths[index]]
            self.kv.keep(table, row, [growth.candidates[i].expanded for i in path], len(acceptance.token_ids[index]))
            self._learn(growth, order, path)
        return self.kv.lags(table)

    def release(self, rows: list[int]) -> None:
        self.kv.release(rows)
        self.pipeline.release(rows)

    def _catch_up(self, table: SequenceTable, plan: StepPlan, budgets: dict[int, DraftBudget]) -> list[Drafting]:
        """Computes the tokens that the draft has not seen; returns the trees to begin, with their roots' children."""
        segments: list[Segment] = []
        starting: list[DraftBudget] = []
        for s in plan.scheduled:
            count = self.kv.granted(s)
            budget = budgets.get(s.row)
            drafts = budget is not None and self.kv.reaches_tip(s, count)
            if count == 0 or (s.draft_catch_up == 0 and not drafts):
                continue
            start = self.kv.computed(s.row)
            segments.append(Segment(s.row, start, count, logits_from=count - 1 if drafts else -1))
            self.kv.advance(table, s.row, start + count)
            if drafts and budget is not None:
                starting.append(budget)
        if not segments:
            return []
        logits = self._forward(table, segments)
        active = [Drafting(b.row, TreeGrowth(b), [ROOT]) for b in starting]
        return self._grow(table, active, logits)

    def _level(self, table: SequenceTable, active: list[Drafting]) -> list[Drafting]:
        """One forward pass over every tree's frontier."""
        segments = []
        for a in active:
            nodes = [a.growth.candidates[i] for i in a.frontier]
            segments.append(
                Segment(
                    row=a.row,
                    start=int(table.num_tokens[a.row]),
                    num_chain=0,
                    tokens=np.array([n.token for n in nodes], np.int32),
                    depths=np.array([n.depth for n in nodes], np.int32),
                    words=a.growth.words(a.frontier),
                    first_node=nodes[0].expanded,
                    logits_from=0,
                )
            )
        return self._grow(table, active, self._forward(table, segments))

    def _forward(self, table: SequenceTable, segments: list[Segment]) -> torch.Tensor:
        batch = build_token_batch(table, segments)
        return self.runner.logits(self.runner.forward(batch), batch.logits_rows)

    def _grow(self, table: SequenceTable, active: list[Drafting], logits: torch.Tensor) -> list[Drafting]:
        """Adds children to every frontier candidate; returns the trees that go on, with their next frontiers."""
        rows = logits.numpy()
        place = 0
        going_on = []
        for a in active:
            for candidate in a.frontier:
                self._add_children(table, a, candidate, rows[place])
                place += 1
            frontier = a.growth.frontier()
            if frontier:
                going_on.append(Drafting(a.row, a.growth, frontier))
            else:
                self._grown[a.row] = (a.growth, [])
        return going_on

    def _add_children(self, table: SequenceTable, a: Drafting, candidate: int, logits: Floats) -> None:
        width = min(a.growth.budget.max_width, a.growth.budget.max_nodes)
        if self.pipeline.is_plain_greedy(table, a.row):
            real = logits[: self.num_token_ids]
            tokens = top_ids(real, width)
            chances = (real[tokens] - log_sum_exp(real)).tolist()
            a.growth.add(candidate, tokens.tolist(), chances, chances)
            return
        path = a.growth.path_tokens(candidate)
        law = self.pipeline.law(logits, table, a.row, path)
        if not len(law.tokens):
            return
        index = table.output_index(a.row) + len(path)
        noise = RequestNoise(int(table.seeds[a.row]), int(table.choices[a.row]))
        if self.samples_law:
            a.growth.laws.append(law.logprobs(self.target_ids))
            a.growth.add(candidate, [law.next(noise, index, Stream.DRAFT)], [0.0], [0.0])
            return
        places, perturbed = perturbed_top(law.scores, law.tokens, noise, Stream.NEXT, index, max(2, width))
        gaps = gaps_of(perturbed.tolist())[:width]
        a.growth.add(candidate, law.tokens[places[:width]].tolist(), self.coupling.log_chance(gaps), gaps)

    def _tree(self, row: int) -> DraftTree:
        grown = self._grown.get(row)
        if grown is None:
            return DraftTree.empty()
        tree, order = grown[0].tree(SOURCE)
        self._grown[row] = (grown[0], order)
        return tree

    def _learn(self, growth: TreeGrowth, order: list[int], path: list[int]) -> None:
        """Fits the coupling to the children of visited nodes: one was accepted, or none."""
        if self.samples_law:
            return
        visited, accepted = {ROOT, *path}, set(path)
        for i in order:
            candidate = growth.candidates[i]
            if candidate.parent in visited and candidate.gap:
                self.coupling.learn(candidate.rank, candidate.gap, accepted=i in accepted)


DRAFTER = DraftModelDrafter
