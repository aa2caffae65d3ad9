"""Turns what is known right now into a choice: a snapshot and a prefill plan per usable engine, the policy's order.

Reads registry, load book and prefix index; sends nothing. `dispatcher` acts on the choice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvferry_engine.wire.messages import Role
from kvferry_server.engines.client import EngineClient
from kvferry_server.engines.registry import EngineRegistry
from kvferry_server.routing.disaggregation import PrefillPlan, plan_prefill
from kvferry_server.routing.load_book import LoadBook
from kvferry_server.routing.policies.base import Candidate, Policy
from kvferry_server.routing.prefix_index import PrefixIndex
from kvferry_server.routing.resume import ResumeRecord
from kvferry_server.routing.snapshot import EngineSnapshot, RoutedRequest, kv_bytes_per_token
from kvferry_server.settings import Disaggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The engine to submit to next, and where its prompt should come from."""

    engine: EngineClient
    plan: PrefillPlan
    cached_tokens: int
    """Of the prompt, on that engine."""


class Chooser:
    """Chooses decode engine and prefill hints for one submission at a time."""

    def __init__(
        self,
        *,
        registry: EngineRegistry,
        load_book: LoadBook,
        prefix_index: PrefixIndex,
        policy: Policy,
        mode: Disaggregation,
    ) -> None:
        self._registry = registry
        self._load_book = load_book
        self._prefix_index = prefix_index
        self._policy = policy
        self._mode = mode

    def choose(
        self, record: ResumeRecord, *, exclude: Collection[str] = (), handoff_from: EngineClient | None = None
    ) -> Choice | None:
        """Return the best engine outside `exclude` (boots), or None when there is none.

        `handoff_from`: the draining engine that runs the request; it never decodes it again but is the first hint.
        """
        usable = {engine.boot: engine for engine in self._registry.usable()}
        cached = self._cached_tokens(record, usable.values())
        snapshots = {boot: self.snapshot(engine, cached.get(boot, 0)) for boot, engine in usable.items()}
        source = self.snapshot(handoff_from, record.num_context_tokens) if handoff_from is not None else None
        request = _routed(record)
        wanted_assets = self._wanted_assets(record)
        candidates = [
            Candidate(
                engine=snapshots[boot],
                plan=plan_prefill(
                    snapshots[boot], list(snapshots.values()), request, mode=self._mode, handoff_from=source
                ),
            )
            for boot, engine in usable.items()
            if boot not in exclude and engine is not handoff_from and _may_run(engine, record, wanted_assets)
        ]
        if not candidates:
            return None
        best = self._policy.order(candidates, request)[0]
        return Choice(engine=usable[best.engine.boot], plan=best.plan, cached_tokens=best.engine.cached_tokens)

    def decoders(self) -> list[EngineSnapshot]:
        """Return the usable engines that new requests queue on: all but prefill ones, or all if there are no others."""
        snapshots = [self.snapshot(engine, 0) for engine in self._registry.usable()]
        willing = [snapshot for snapshot in snapshots if snapshot.role is not Role.PREFILL]
        return willing or snapshots

    def snapshot(self, engine: EngineClient, cached_tokens: int) -> EngineSnapshot:
        """Return what policies see of an engine that has told its model."""
        model = engine.model
        assert model is not None
        return EngineSnapshot(
            boot=engine.boot,
            name=engine.name,
            address=engine.peer_address,
            role=engine.role,
            pair_hash=model.pair_hash,
            block_size=model.layout.block_size,
            kv_bytes_per_token=kv_bytes_per_token(model.layout),
            max_num_seqs=max(1, model.max_num_seqs),
            max_num_batched_tokens=model.max_num_batched_tokens,
            load=self._load_book.view(engine.boot),
            cached_tokens=cached_tokens,
        )

    def _wanted_assets(self, record: ResumeRecord) -> str:
        """Return the digest of the assets that made the prompt's ids."""
        view = self._registry.model()
        return record.request.assets_digest or (view.info.assets_digest if view is not None else "")

    def _cached_tokens(self, record: ResumeRecord, engines: Collection[EngineClient]) -> dict[str, int]:
        cached: dict[str, int] = {}
        for block_size in {engine.model.layout.block_size for engine in engines if engine.model is not None}:
            matched = self._prefix_index.matched_blocks(record.context_hashes(block_size))
            for engine in engines:
                if engine.model is not None and engine.model.layout.block_size == block_size:
                    cached[engine.boot] = matched.get(engine.boot, 0) * block_size
        return cached


def _may_run(engine: EngineClient, record: ResumeRecord, wanted_assets: str) -> bool:
    """Token ids mean the same there; once tokens were emitted, the engine must also continue with the same ones."""
    model = engine.model
    assert model is not None
    if record.output_hash:
        return model.output_hash == record.output_hash
    return model.assets_digest == wanted_assets


def _routed(record: ResumeRecord) -> RoutedRequest:
    still_open: Sequence[object] = record.open_sequences
    return RoutedRequest(
        num_prompt_tokens=record.num_context_tokens,
        num_sequences=len(still_open),
        max_tokens=record.request.sampling.max_tokens,
        session_id=record.request.session_id,
        needs_local_prefill=record.needs_prompt_logprobs,
    )
