"""Moves blocks between the pool, the prefix index and sequences; the only code that does, so ownership has one author.

What a sequence may share is decided here: full blocks of its known tokens, at least one token left to compute.
"""

from __future__ import annotations

from kvferry_engine.kv_cache.block_pool import NO_FENCE, BlockPool, Owner
from kvferry_engine.kv_cache.prefix_index import PrefixIndex
from kvferry_engine.request import Purpose, Sequence
from kvferry_engine.wire.hashing import chain_hashes


class SequenceBlocks:
    """Gives blocks to sequences and takes them back. `num_queried`, `num_hit`: tokens looked up in and found by the cache."""

    def __init__(self, pool: BlockPool, index: PrefixIndex, *, enable_prefix_caching: bool) -> None:
        self._pool = pool
        self._index = index
        self._enable_prefix_caching = enable_prefix_caching
        self.block_size = pool.block_size
        self._epoch = 0
        self.num_queried = 0
        self.num_hit = 0
        pool.on_evict = index.remove

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def can_share(self, sequence: Sequence) -> bool:
        """Whether the sequence may read its prompt's KV from the prefix cache.

        Prompt log-probs come from computing the prompt, so a cached part would leave holes in them.
        """
        needs_whole_prompt = (
            sequence.sampling.prompt_logprobs is not None and sequence.num_prompt_logprobs < sequence.num_prompt - 1
        )
        return self._enable_prefix_caching and not needs_whole_prompt

    def uncomputed_tokens(self, sequence: Sequence) -> int:
        """Return how many known tokens the sequence would have to compute if it started now."""
        known = sequence.upto if sequence.purpose is Purpose.PREFILL else sequence.num_tokens
        num_held = len(sequence.blocks) + len(self._cached_blocks(sequence))
        return max(known - num_held * self.block_size, 0)

    def admit(self, sequence: Sequence, num_tokens: int, *, margin: int) -> bool:
        """Complete the blocks of a sequence to room for `num_tokens`, cached prefix first.

        False, and nothing changes, unless `margin` further blocks would be left. A PREFILL sequence whose whole prompt is
        cached takes no blocks: its `num_computed` reaches `upto`.
        """
        if sequence.purpose is Purpose.GENERATE and self._pool.num_free <= margin:
            return False
        cached = self._cached_blocks(sequence)
        num_held = len(sequence.blocks) + len(cached)
        if sequence.purpose is Purpose.PREFILL and num_held * self.block_size >= sequence.upto:
            self._count_lookup(sequence, len(cached))
            sequence.num_computed = sequence.upto
            return True
        num_new = self.blocks_for(num_tokens) - num_held
        if num_new + margin > self._pool.num_free - self._pool.num_idle(cached):
            return False
        self._attach(sequence, cached)
        new = self._pool.allocate(num_new, Owner.SEQUENCE, sequence.handle)
        assert new is not None
        sequence.blocks.extend(new)
        return True

    def attach_prefix(self, sequence: Sequence) -> int:
        """Take references on the cached leading blocks; return the tokens they hold."""
        self._attach(sequence, self._cached_blocks(sequence))
        return sequence.num_computed

    def reserve(self, sequence: Sequence, num_blocks_total: int, *, margin: int) -> list[int] | None:
        """Reserve the blocks from those the sequence has up to `num_blocks_total` for ferried content."""
        num_new = num_blocks_total - len(sequence.blocks)
        if num_new <= 0:
            return []
        if num_new + margin > self._pool.num_free:
            return None
        new = self._pool.allocate(num_new, Owner.RECV_RESERVED, sequence.handle)
        assert new is not None
        sequence.blocks.extend(new)
        return new

    def commit(self, sequence: Sequence, num_blocks_total: int) -> None:
        """Make the leading reserved blocks up to `num_blocks_total` the sequence's and index them."""
        first = sequence.num_computed // self.block_size
        if num_blocks_total <= first:
            return
        assert num_blocks_total <= len(sequence.blocks), "committed more than was reserved"
        assert num_blocks_total * self.block_size < sequence.num_tokens, "the last token is always computed here"
        self._pool.reassign(sequence.blocks[first:num_blocks_total], Owner.SEQUENCE, sequence.handle)
        computed = num_blocks_total * self.block_size
        sequence.num_remote += computed - sequence.num_computed
        sequence.num_computed = computed
        self.index_full(sequence)

    def trim(self, sequence: Sequence) -> None:
        """Give back reserved blocks that were never committed."""
        num_kept = self.blocks_for(sequence.num_computed)
        self._pool.release(sequence.blocks[num_kept:], sequence.handle)
        del sequence.blocks[num_kept:]

    def index_full(self, sequence: Sequence) -> None:
        """Make the full computed blocks of a sequence findable; content that is known already stays a private copy.

        PREFILL blocks are indexed even without prefix caching: the sender finds them by hash.
        """
        num_full = sequence.num_computed // self.block_size
        if sequence.cache_epoch == self._epoch and (self._enable_prefix_caching or sequence.purpose is Purpose.PREFILL):
            self._hash_blocks(sequence, num_full)
            for position in range(sequence.num_indexed, num_full):
                block, block_hash = sequence.blocks[position], sequence.hashes[position]
                if self._index.insert(block_hash, block):
                    self._pool.set_hash(block, block_hash)
        sequence.num_indexed = num_full

    def release(self, sequence: Sequence, *, fence: int = NO_FENCE) -> None:
        """Give back everything a sequence holds; indexed blocks stay in the cache."""
        self._pool.release(sequence.blocks, sequence.handle, fence=fence)
        sequence.blocks = []
        sequence.num_indexed = 0

    def drop_cache(self) -> None:
        """Forget all cached content. Blocks of unfinished sequences stay theirs and are never indexed."""
        self._epoch += 1
        self._index.clear()
        self._pool.forget_hashes()

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Cached blocks that continue what the sequence holds."""
        if not self.can_share(sequence):
            return []
        first = len(sequence.blocks)
        if first and sequence.cache_epoch != self._epoch:
            return []
        if sequence.purpose is Purpose.PREFILL:
            num_blocks = sequence.upto // self.block_size
        else:
            num_blocks = (sequence.num_tokens - 1) // self.block_size
        self._hash_blocks(sequence, num_blocks)
        return self._index.lookup(sequence.hashes[first:num_blocks])

    def _attach(self, sequence: Sequence, cached: list[int]) -> None:
        self._count_lookup(sequence, len(cached))
        self._pool.take(cached, Owner.SEQUENCE, sequence.handle)
        if not sequence.blocks:
            sequence.cache_epoch = self._epoch
        sequence.blocks.extend(cached)
        sequence.num_computed = len(sequence.blocks) * self.block_size
        sequence.num_indexed = len(sequence.blocks)

    def _count_lookup(self, sequence: Sequence, num_cached_blocks: int) -> None:
        if sequence.num_preemptions:
            return
        num_cached = min(num_cached_blocks * self.block_size, sequence.num_prompt - sequence.num_cached)
        if self.can_share(sequence):
            self.num_queried += sequence.num_prompt if sequence.cache_epoch < 0 else 0
            self.num_hit += num_cached
        sequence.num_cached += num_cached

    def _hash_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        """Extend `hashes` to this many full blocks of known tokens."""
        known = len(sequence.hashes)
        if known >= num_blocks:
            return
        ids = sequence.ids(known * self.block_size, num_blocks * self.block_size).astype("<i4", copy=False).tobytes()
        parent = sequence.hashes[-1] if sequence.hashes else sequence.root
        sequence.hashes.extend(chain_hashes(ids, self.block_size, parent))
