"""`DraftKV`: what a draft model's KV cache holds, over the target's block ids.

Owns, a row: how many leading tokens have KV; a block: whether all its slots do (so that a prefix found in the cache is
known to be there for the draft too). A lagging draft catches up within what the plan grants.

    kv.apply(plan)
    count = kv.granted(scheduled)
"""

from __future__ import annotations

import numpy as np

from specengine.core.plan import ScheduledSequence, StepPlan
from specengine.runner.kv_cache import KVCache
from specengine.runner.sequence_table import SequenceTable

FREE_TOKENS = 2  # the last token, and the one before it where an accepted leaf was never expanded


class DraftKV:
    def __init__(self, cache: KVCache, max_rows: int, num_blocks: int):
        self.cache = cache
        self.valid = np.zeros(num_blocks, bool)
        self._computed = np.zeros(max_rows, np.int32)
        self._known: dict[int, int] = {}  # row -> tokens that the target has computed after this step

    def apply(self, plan: StepPlan) -> None:
        """Takes in what the plan says about blocks and new rows."""
        self.valid[plan.fresh_blocks] = False
        self.cache.copy_blocks(plan.block_copies)
        size = self.cache.block_size
        for new in plan.new:
            blocks = new.block_ids[: new.num_computed_tokens // size]
            filled = self.valid[blocks]
            self._computed[new.row] = size * (len(filled) if filled.all() else int(filled.argmin()))
        self._known = {s.row: s.start + s.num_tokens for s in plan.scheduled}

    def computed(self, row: int) -> int:
        return int(self._computed[row])

    def granted(self, scheduled: ScheduledSequence) -> int:
        """Tokens of this row that the draft may compute now."""
        pending = self._known[scheduled.row] - self.computed(scheduled.row)
        return min(pending, scheduled.draft_catch_up + FREE_TOKENS)

    def reaches_tip(self, scheduled: ScheduledSequence, count: int) -> bool:
        return self.computed(scheduled.row) + count == self._known[scheduled.row]

    def advance(self, table: SequenceTable, row: int, computed: int) -> None:
        """Records that the row's first `computed` tokens have KV."""
        size = self.cache.block_size
        full = table.block_table[row, self._computed[row] // size : computed // size]
        self.valid[full] = True
        self._computed[row] = computed

    def keep(self, table: SequenceTable, row: int, expanded: list[int], num_emitted: int) -> None:
        """Moves the KV of accepted nodes (their order of expansion, -1 where none) behind the committed tokens.

        The table has already grown by `num_emitted` tokens.
        """
        tree_start = int(table.num_tokens[row]) - num_emitted
        kept = 0
        while kept < len(expanded) and expanded[kept] >= 0:
            kept += 1
        moves = [(table.slot(row, tree_start + e), table.slot(row, tree_start + j)) for j, e in enumerate(expanded[:kept]) if e != j]
        self.cache.move([source for source, _ in moves], [target for _, target in moves])
        if self._computed[row] == tree_start:
            self.advance(table, row, tree_start + kept)

    def lags(self, table: SequenceTable) -> dict[int, int]:
        """Row -> tokens that the draft lacks beyond what it computes anyway, for the step's sequences."""
        found = {}
        for row, known in self._known.items():
            at_tip = known >= table.num_prompt_tokens[row]
            goal = int(table.num_tokens[row]) - FREE_TOKENS if at_tip else known
            if (lag := goal - self.computed(row)) > 0:
                found[row] = lag
        return found

    def release(self, rows: list[int]) -> None:
        self._computed[rows] = 0
