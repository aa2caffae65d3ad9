"""The prefix index against a plain model of it, and the event stream that feeds it."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry_engine.wire.hashing import chain_hashes, namespace_root
from kvferry_engine.wire.messages import EventsSnapshot
from kvferry_engine.wire.packing import pack_ids
from kvferry_server.routing.prefix_index import PrefixIndex, split_hashes
from server.kit_engine import FakeEngine, running, until

BLOCKS = [hashlib.sha256(bytes([number])).digest()[:16] for number in range(12)]
ENGINES = ["a", "b", "c", "d"]

blocks = st.lists(st.sampled_from(BLOCKS), max_size=8)
engines = st.sampled_from(ENGINES)


class IndexMachine(RuleBasedStateMachine):
    """Every operation is done on the index and on one set per engine."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[str, set[bytes]] = {}

    @rule(engine=engines, hashes=blocks)
    def stored(self, engine: str, hashes: list[bytes]) -> None:
        self.index.stored(engine, hashes)
        self.model.setdefault(engine, set()).update(hashes)

    @rule(engine=engines, hashes=blocks)
    def removed(self, engine: str, hashes: list[bytes]) -> None:
        self.index.removed(engine, hashes)
        self.model.get(engine, set()).difference_update(hashes)

    @rule(engine=engines, hashes=blocks)
    def snapshot(self, engine: str, hashes: list[bytes]) -> None:
        self.index.replace(engine, hashes)
        self.model[engine] = set(hashes)

    @rule(engine=engines)
    def left(self, engine: str) -> None:
        self.index.remove_engine(engine)
        self.model.pop(engine, None)

    @rule(prompt=blocks)
    def matches_are_the_leading_runs(self, prompt: list[bytes]) -> None:
        expected = {}
        for engine, held in self.model.items():
            run = next((n for n, block in enumerate(prompt) if block not in held), len(prompt))
            if run:
                expected[engine] = run
        assert self.index.matched_blocks(prompt) == expected

    @invariant()
    def sizes_agree(self) -> None:
        assert len(self.index) == len(set().union(*self.model.values()))
        for engine in ENGINES:
            assert self.index.num_blocks(engine) == len(self.model.get(engine, set()))


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_bits_of_engines_that_left_are_reused() -> None:
    index = PrefixIndex()
    for number in range(200):
        index.stored(f"engine {number}", BLOCKS[:1])
        index.remove_engine(f"engine {number}")
    index.stored("last", BLOCKS[:1])
    assert index._bits == {"last": 1}


def test_hash_columns_are_split_and_odd_lengths_refused() -> None:
    assert split_hashes(b"".join(BLOCKS)) == BLOCKS
    with pytest.raises(ValueError, match="multiple of 16"):
        split_hashes(b"x" * 17)


def prompt_hashes(ids: list[int]) -> list[bytes]:
    return chain_hashes(pack_ids(ids), 16, namespace_root())


async def test_events_bring_requests_to_the_engine_with_their_prefix() -> None:
    async with running(FakeEngine("a"), FakeEngine("b"), FakeEngine("c")) as router:
        prompt = list(range(200))
        holder = router.engines[1]
        holder.store(prompt_hashes(prompt))
        await until(lambda: router.core.prefix_index.num_blocks(holder.boot) == 12)
        for _ in range(3):
            generation = await router.core.dispatcher.submit(router.request(prompt_ids=prompt))
            assert generation.decode_engine == "b"
            await generation.aclose()


async def test_every_connection_begins_with_a_snapshot() -> None:
    engine = FakeEngine("a")
    engine.blocks = set(BLOCKS)
    engine.events_number = 40
    async with running(engine) as router:
        await until(lambda: router.core.prefix_index.num_blocks(engine.boot) == len(BLOCKS))
        await engine.cut()
        await until(lambda: len(engine.got(EventsSnapshot)) == 2)


async def test_a_gap_in_the_events_asks_for_a_snapshot() -> None:
    async with running(FakeEngine("a")) as router:
        engine = router.engines[0]
        await until(lambda: engine.got(EventsSnapshot))
        engine.store(BLOCKS[:2])
        await until(lambda: router.core.prefix_index.num_blocks(engine.boot) == 2)
        engine.store(BLOCKS[2:6], skip_number=True)
        await until(lambda: router.core.prefix_index.num_blocks(engine.boot) == 6)
        assert router.core.cache_events.num_gaps == 1


async def test_a_dead_engine_leaves_the_index() -> None:
    async with running(FakeEngine("a")) as router:
        engine = router.engines[0]
        await until(lambda: engine.got(EventsSnapshot))
        engine.store(BLOCKS)
        await until(lambda: len(router.core.prefix_index) == len(BLOCKS))
        await engine.crash()
        await until(lambda: len(router.core.prefix_index) == 0)
