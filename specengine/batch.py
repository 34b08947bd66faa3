"""`TokenBatch`: the flat ragged batch that one forward pass takes. Tensor nouns, no behaviour.

A sequence's rows are chain rows (committed tokens whose KV is missing), then node rows (its draft tree, parents first).
Keys of a sequence lie at consecutive slots of its blocks: cached context, chain rows, node rows.

    visible(row, key) := key <= position(row)                            where key <  tree_start
                         bit (key - tree_start) of tree_mask[row]        otherwise

Reductions run over logical position: position p < tree_start is slot p of the block table; position
tree_start + j is the slot of the row's j-th ancestor-or-self, the j-th set bit of its mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenBatch:
    """N rows of R sequences. All tensors lie on the device of the model that runs it."""

    input_ids: torch.Tensor  # int64 [N]
    positions: torch.Tensor  # int32 [N]: logical position (depth for nodes), for RoPE and for attention
    slot_mapping: torch.Tensor  # int64 [N]: block id * block_size + offset, where the row's K and V are written
    query_start_loc: torch.Tensor  # int32 [R + 1]: rows of sequence r are query_start_loc[r] : query_start_loc[r + 1]
    seq_lens: torch.Tensor  # int32 [R]: keys of the sequence, node rows of this and earlier batches included
    tree_start: torch.Tensor  # int32 [R]: first key that is a tree node; keys before it are a plain context
    tree_mask: torch.Tensor  # int64 [N, words]: ancestor-or-self bits; 0 for chain rows
    block_tables: torch.Tensor  # int32 [R, max_blocks]: unused entries are 0 and never read
    logits_rows: torch.Tensor  # int64 [L]: rows of which the caller wants logits
    max_query_len: int
    max_seq_len: int

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]
