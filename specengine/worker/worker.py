"""`Worker`: one step on one device, from a plan to a result.

Owns the sequence table, the target's runner, the drafter and the verifier, and the order in which they act. Knows
nothing about requests, text or sockets.

    result = worker.execute(plan)
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from specengine.batch import TokenBatch
from specengine.core.plan import SequenceResult, SourceCounts, StepPlan, StepResult, TokenLogprobs
from specengine.runner.batch_builder import build_token_batch, segments_of
from specengine.runner.model_runner import ForwardOutput, ModelRunner
from specengine.runner.sequence_table import SequenceTable
from specengine.spec import allocator
from specengine.spec.drafter import Drafter
from specengine.spec.verifier import Acceptance, Verifier
from specengine.tree import TreeBatch

TARGET = "target"
PROMPT_LOGPROB_ROWS = 256  # rows of the head at once: each is a vocabulary of float32


@dataclass(frozen=True)
class WorkerSizes:
    """What loading settled, for the scheduler."""

    num_kv_blocks: int
    max_model_len: int
    draft_cost: float  # a draft token's cost in target tokens
    vocab_size: int
    dtype: str


class Worker:
    def __init__(self, target: ModelRunner, drafter: Drafter, verifier: Verifier, table: SequenceTable, sizes: WorkerSizes):
        self.sizes = sizes
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self.table = table

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step: propose, forward, verify, compact, observe."""
        began = time.perf_counter()
        self._apply(plan)
        if not plan.scheduled:  # a plan that only releases rows
            return StepResult(step=plan.step, sequences=[])
        trees = self.drafter.begin(self.table, plan).result()
        trees = allocator.cut(trees, plan.limits)
        drafted = time.perf_counter()
        batch = build_token_batch(self.table, segments_of(plan, trees))
        output = self.target.forward(batch)
        acceptance = self.verifier.verify(self.target.logits(output, batch.logits_rows), trees, self.table)
        sources, targets = compaction(trees, acceptance, self.table)
        self.target.kv_cache.move(sources, targets)
        prompts = self._prompt_logprobs(plan, batch, output)
        for index, row in enumerate(trees.rows.tolist()):
            self.table.append(row, acceptance.token_ids[index])
        lag = self.drafter.observe(self.table, trees, acceptance)
        ended = time.perf_counter()
        return StepResult(
            step=plan.step,
            sequences=sequence_results(plan, trees, acceptance, prompts, lag),
            by_source=counts_by_source(trees, acceptance),
            draft_ms=(drafted - began) * 1000,
            verify_ms=(ended - drafted) * 1000,
            moved_slots=len(sources),
        )

    def close(self) -> None:
        """Drops the models and their memory."""
        del self.target, self.drafter, self.verifier

    def _apply(self, plan: StepPlan) -> None:
        if plan.released:
            self.drafter.release(plan.released)
            self.verifier.release(plan.released)
        self.table.apply(plan)
        self.target.kv_cache.copy_blocks(plan.block_copies)

    def _prompt_logprobs(self, plan: StepPlan, batch: TokenBatch, output: ForwardOutput) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that follow this step's prompt rows, by table row."""
        found: dict[int, list[TokenLogprobs]] = {}
        for s, first in zip(plan.scheduled, batch.query_start_loc.tolist(), strict=False):
            sampling = self.table.sampling[s.row]
            if sampling is None or sampling.prompt_logprobs is None:
                continue
            end = min(s.start + s.num_tokens, int(self.table.num_prompt_tokens[s.row]) - 1)
            entries: list[TokenLogprobs] = []
            for begin in range(s.start, end, PROMPT_LOGPROB_ROWS):
                stop = min(end, begin + PROMPT_LOGPROB_ROWS)
                logits = self.target.logits(output, torch.arange(first + begin - s.start, first + stop - s.start))
                entries += self.verifier.prompt_logprobs(
                    logits, self.table.token_ids[s.row, begin + 1 : stop + 1], sampling.prompt_logprobs
                )
            found[s.row] = entries
        return found


def compaction(trees: TreeBatch, acceptance: Acceptance, table: SequenceTable) -> tuple[list[int], list[int]]:
    """Slots to move so that accepted nodes follow the committed tokens: accepted node j goes to tree_start + j.

    Ascending, with source at or after target (nodes are in topological order), so an in-place copy is safe; empty where
    every accepted path is already contiguous, as a chain's always is.
    """
    sources: list[int] = []
    targets: list[int] = []
    for row, path in zip(trees.rows.tolist(), acceptance.paths, strict=True):
        tree_start = int(table.num_tokens[row])
        for depth, node in enumerate(path):
            if node != depth:
                sources.append(table.slot(row, tree_start + node))
                targets.append(table.slot(row, tree_start + depth))
    return sources, targets


def sequence_results(
    plan: StepPlan, trees: TreeBatch, acceptance: Acceptance, prompts: dict[int, list[TokenLogprobs]], lag: dict[int, int]
) -> list[SequenceResult]:
    """One result a scheduled sequence, in the plan's order; those in mid-prompt have no tokens."""
    place = {int(row): index for index, row in enumerate(trees.rows)}
    results = []
    for s in plan.scheduled:
        index = place.get(s.row)
        if index is None:
            results.append(SequenceResult(s.row, prompt_logprobs=prompts.get(s.row), draft_lag=lag.get(s.row, 0)))
            continue
        first, last = int(trees.node_start[index]), int(trees.node_start[index + 1])
        path = acceptance.paths[index]
        failed = acceptance.errors[index] is not None
        results.append(
            SequenceResult(
                row=s.row,
                token_ids=[] if failed else acceptance.token_ids[index],
                sources=[trees.sources[first + node] for node in path] + [TARGET],
                num_drafted=last - first,
                logprobs=acceptance.logprobs[index],
                prompt_logprobs=prompts.get(s.row),
                draft_lag=lag.get(s.row, 0),
                error=acceptance.errors[index],
            )
        )
    return results


def counts_by_source(trees: TreeBatch, acceptance: Acceptance) -> dict[str, SourceCounts]:
    """Drafted and accepted nodes by source and depth over the whole step."""
    counts: dict[str, SourceCounts] = {}
    for index in range(trees.num_trees):
        nodes = range(int(trees.node_start[index]), int(trees.node_start[index + 1]))
        accepted = {int(trees.node_start[index]) + node for node in acceptance.paths[index]}
        for source in {trees.sources[node] for node in nodes}:
            counts.setdefault(source, SourceCounts()).drafts += 1
        for node in nodes:
            entry, depth = counts[trees.sources[node]], int(trees.depths[node])
            missing = [0] * (depth - len(entry.drafted))
            entry.drafted += missing
            entry.accepted += missing
            entry.drafted[depth - 1] += 1
            entry.accepted[depth - 1] += node in accepted
    return counts
