"""`build_token_batch`: one flat ragged batch out of chain rows and node rows.

Owns the layout of a batch: for every segment chain rows, then node rows, their positions, slots, masks and the rows
whose logits are wanted. Knows nothing about where trees come from.

    batch = build_token_batch(table, [Segment(row=0, start=12, num_chain=1, words=words, depths=depths, tokens=tokens)])
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from specengine.batch import TokenBatch
from specengine.core.plan import StepPlan
from specengine.runner.sequence_table import SequenceTable
from specengine.tree import TreeBatch


def no_tokens() -> np.ndarray:
    return np.zeros(0, np.int32)


def no_words() -> np.ndarray:
    return np.zeros((0, 1), np.int64)


@dataclass(frozen=True)
class Segment:
    """One sequence's rows: tokens[start : start + num_chain] of the table, then the nodes given here.

    `first_node` is the number of nodes of this tree whose KV is already in the cache; the slots of the nodes given are
    start + num_chain + first_node and following, and bit b of their words is the node at slot start + num_chain + b.
    """

    row: int
    start: int
    num_chain: int
    tokens: np.ndarray = field(default_factory=no_tokens)  # int32 [nodes]
    depths: np.ndarray = field(default_factory=no_tokens)  # int32 [nodes], from 1
    words: np.ndarray = field(default_factory=no_words)  # int64 [nodes, words]: ancestor-or-self bits
    first_node: int = 0
    logits_from: int = -1  # index of the first row that wants logits, to the segment's end; -1: none


def segments_of(plan: StepPlan, trees: TreeBatch) -> list[Segment]:
    """The target's segments of a step: the plan's chain rows, and the trees of its tip sequences.

    Logits are wanted of the root (a tip's last chain row) and of every node.
    """
    words = trees.ancestor_words()
    place = {int(row): i for i, row in enumerate(trees.rows)}
    segments = []
    for s in plan.scheduled:
        if not s.is_tip:
            segments.append(Segment(s.row, s.start, s.num_tokens))
            continue
        i = place[s.row]
        nodes = slice(trees.node_start[i], trees.node_start[i + 1])
        root = s.num_tokens - 1
        segments.append(Segment(s.row, s.start, s.num_tokens, trees.tokens[nodes], trees.depths[nodes], words[nodes], logits_from=root))
    return segments


def build_token_batch(table: SequenceTable, segments: list[Segment]) -> TokenBatch:
    """Gathers the batch's tensors; segments keep their order, and so do the rows of `logits_rows`."""
    chain = np.array([s.num_chain for s in segments], np.int64)
    nodes = np.array([len(s.tokens) for s in segments], np.int64)
    start = np.array([s.start for s in segments], np.int64)
    first = np.array([s.first_node for s in segments], np.int64)
    rows = np.array([s.row for s in segments], np.int64)
    tree_start = start + chain
    lengths = chain + nodes
    query_start = np.concatenate([[0], np.cumsum(lengths)])
    total = int(query_start[-1])

    segment_of = np.repeat(np.arange(len(segments)), lengths)
    offset = np.arange(total) - query_start[segment_of]
    is_node = offset >= chain[segment_of]
    key = start[segment_of] + offset + np.where(is_node, first[segment_of], 0)  # place among the sequence's keys
    row_of = rows[segment_of]

    input_ids = table.token_ids[row_of, np.minimum(key, table.max_len)].astype(np.int64)
    positions = key.copy()
    words = np.zeros((total, max([s.words.shape[1] for s in segments if len(s.tokens)], default=1)), np.int64)
    if nodes.any():
        input_ids[is_node] = np.concatenate([s.tokens for s in segments])
        depths = np.concatenate([s.depths for s in segments])
        positions[is_node] = tree_start[segment_of][is_node] + depths - 1
        at = np.flatnonzero(is_node)
        done = 0
        for s in segments:
            if len(s.tokens):
                words[at[done : done + len(s.tokens)], : s.words.shape[1]] = s.words
                done += len(s.tokens)
    size = table.block_size
    slots = table.block_table[row_of, key // size].astype(np.int64) * size + key % size
    wanted = [np.arange(query_start[i] + s.logits_from, query_start[i + 1]) for i, s in enumerate(segments) if s.logits_from >= 0]
    seq_lens = np.where(nodes > 0, tree_start + first + nodes, tree_start)
    used_blocks = max(1, int(-(-seq_lens.max(initial=1) // size)))
    return TokenBatch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions.astype(np.int32)),
        slot_mapping=torch.from_numpy(slots),
        query_start_loc=torch.from_numpy(query_start.astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        tree_start=torch.from_numpy(tree_start.astype(np.int32)),
        tree_mask=torch.from_numpy(words),
        block_tables=torch.from_numpy(np.ascontiguousarray(table.block_table[rows, :used_blocks])),
        logits_rows=torch.from_numpy(np.concatenate(wanted) if wanted else np.zeros(0, np.int64)),
        max_query_len=int(lengths.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
    )
