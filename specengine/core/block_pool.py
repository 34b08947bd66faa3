"""`BlockPool`: which KV blocks are in use, by how many, and which hold a prefix that can be used again.

Owns reference counts, prefix hashes, and the free list, which is in least-recently-used order: a block that is freed
keeps its contents until it is handed out again. Knows nothing about sequences or tensors.

    pool = BlockPool(num_blocks=1024, block_size=16, enable_prefix_caching=True)
    ids = pool.allocate(3)
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as ListLike

NO_PARENT = b""


def block_hash(parent: bytes, token_ids: ListLike[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    """SHA-256 over the parent block's hash, the block's token ids, and what else keys the cache (salt, adapter)."""
    digest = hashlib.sha256(parent)
    digest.update(array("q", token_ids).tobytes())
    for key in extra_keys:
        digest.update(len(key).to_bytes(4, "little") + key.encode())
    return digest.digest()


class BlockPool:
    """Blocks 0 to num_blocks - 1 of `block_size` token slots each."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._fresh: list[int] = []
        self.queried_tokens = 0
        self.hit_tokens = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.num_used / self.num_blocks

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with a reference count of 1, least recently used first; None where fewer are free."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        self._fresh.extend(blocks)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Takes one more reference to each block, free ones (with contents kept) included."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._free[block]
            self.ref_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Gives one reference of each back. The last block of a prefix is reused first, so that its start stays longest."""
        for block in reversed(blocks):
            if self.ref_counts[block] <= 0:
                raise ValueError(f"block {block} is released more often than it was taken")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)  # nothing in it is worth keeping

    def match_prefix(self, hashes: list[bytes]) -> list[int]:
        """Blocks that hold the longest known run of `hashes`; takes no reference."""
        found: list[int] = []
        if self.enable_prefix_caching:
            for key in hashes:
                block = self._by_hash.get(key)
                if block is None:
                    break
                found.append(block)
        return found

    def publish(self, block: int, key: bytes) -> None:
        """Makes a full block of committed tokens findable; a block that already holds the same prefix stays the owner."""
        if self.enable_prefix_caching and key not in self._by_hash and block not in self._hash_of:
            self._by_hash[key] = block
            self._hash_of[block] = key

    def is_published(self, block: int) -> bool:
        return block in self._hash_of

    def take_fresh(self) -> list[int]:
        """Blocks handed out since the last call: nothing in them is valid for any model."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def reset_prefix_cache(self) -> bool:
        """Forgets every prefix. False, and nothing happens, while blocks are in use."""
        if self.num_used:
            return False
        self._by_hash.clear()
        self._hash_of.clear()
        return True

    def _forget(self, block: int) -> None:
        key = self._hash_of.pop(block, None)
        if key is not None:
            del self._by_hash[key]
