"""`SequenceTable`: the worker's fixed rows, one a running sequence; `apply(plan)` is the only way in.

Owns token ids, lengths, block ids, and per-row sampling state as numpy arrays that batches are gathered from each step.
Rows never move. Knows nothing about models or trees.

    table.apply(plan)
    table.token_ids[row, : table.num_tokens[row]]
"""

from __future__ import annotations

import numpy as np

from specengine.core.plan import NewSequence, StepPlan
from specengine.sampling_params import SamplingParams


class SequenceTable:
    """Token ids int32 [max_rows, max_len], block ids int32 [max_rows, max_blocks]; pages are touched as they fill."""

    def __init__(self, max_rows: int, max_len: int, block_size: int):
        self.block_size = block_size
        self.max_len = max_len
        self.token_ids = np.zeros((max_rows, max_len + 1), np.int32)
        self.num_tokens = np.zeros(max_rows, np.int32)
        self.num_prompt_tokens = np.zeros(max_rows, np.int32)
        self.num_computed = np.zeros(max_rows, np.int32)
        self.block_table = np.zeros((max_rows, -(-(max_len + 1) // block_size) + 1), np.int32)
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.seeds = np.zeros(max_rows, np.uint64)
        self.choices = np.zeros(max_rows, np.int32)
        self.max_output_tokens = np.zeros(max_rows, np.int32)
        self.sequence_ids: list[str | None] = [None] * max_rows
        self.sampling: list[SamplingParams | None] = [None] * max_rows
        self.stop_token_ids: list[tuple[int, ...]] = [()] * max_rows

    @property
    def max_rows(self) -> int:
        return len(self.sequence_ids)

    def rows(self) -> list[int]:
        """Rows in use, ascending."""
        return [row for row, sequence_id in enumerate(self.sequence_ids) if sequence_id is not None]

    def apply(self, plan: StepPlan) -> None:
        """Releases rows, adds new ones, and appends block ids of scheduled ones."""
        for row in plan.released:
            self._release(row)
        for new in plan.new:
            self._add(new)
        for scheduled in plan.scheduled:
            row = scheduled.row
            if scheduled.new_block_ids:
                self._append_blocks(row, scheduled.start, scheduled.new_block_ids)
            self.num_computed[row] = scheduled.start

    def append(self, row: int, token_ids: list[int]) -> None:
        """Adds the tokens that a step gave the row."""
        start = int(self.num_tokens[row])
        end = start + len(token_ids)
        self.token_ids[row, start:end] = token_ids
        self.num_tokens[row] = end

    def tokens(self, row: int) -> np.ndarray:
        """The row's committed token ids, int32 [num_tokens], a view."""
        return self.token_ids[row, : self.num_tokens[row]]

    def slot(self, row: int, position: int) -> int:
        """KV slot of the row's key number `position`."""
        return int(self.block_table[row, position // self.block_size]) * self.block_size + position % self.block_size

    def output_index(self, row: int) -> int:
        """Output index t of the next token, from 0; part of the noise key."""
        return int(self.num_tokens[row] - self.num_prompt_tokens[row])

    def _add(self, new: NewSequence) -> None:
        row, length = new.row, len(new.token_ids)
        self.sequence_ids[row] = new.sequence_id
        self.token_ids[row, :length] = new.token_ids
        self.num_tokens[row] = length
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed[row] = new.num_computed_tokens
        self.num_blocks[row] = len(new.block_ids)
        self.block_table[row, : len(new.block_ids)] = new.block_ids
        self.seeds[row] = np.uint64(new.seed & 0xFFFF_FFFF_FFFF_FFFF)
        self.choices[row] = new.choice
        self.max_output_tokens[row] = new.max_output_tokens
        self.sampling[row] = new.sampling
        self.stop_token_ids[row] = new.stop_token_ids

    def _append_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        # A rollback gave back every block beyond the committed tokens, so new ids follow ceil(start / block_size) blocks.
        first = -(-start // self.block_size)
        self.block_table[row, first : first + len(block_ids)] = block_ids
        self.num_blocks[row] = first + len(block_ids)

    def _release(self, row: int) -> None:
        self.sequence_ids[row] = None
        self.sampling[row] = None
        self.stop_token_ids[row] = ()
        self.num_tokens[row] = 0
        self.num_blocks[row] = 0
