"""What the router keeps of a running request so that any engine can continue it: the resume record. Pure.

A sequence is its seed and the ids emitted so far; with counter-based sampling another engine continues with the same tokens.
Offsets in STEP rows make repeated and missing tokens visible, whoever sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry_engine.wire.hashing import chain_hashes, namespace_root
from kvferry_engine.wire.messages import Finish, PrefillHint, Submit, SubmitSequence
from kvferry_engine.wire.packing import pack_ids
from kvferry_server.requests import EngineRequest

MAX_BARREN_DEATHS = 2
"""Engine deaths in a row, without one token in between, after which a request counts as their cause."""


@dataclass(slots=True)
class SequenceRecord:
    """One of the n sequences. `emitted`: output ids that reached this router, in order."""

    index: int
    seed: int
    emitted: list[int] = field(default_factory=list)
    finish: Finish | None = None
    stopped: bool = False
    """The dialect ended it (stop string)."""
    has_report: bool = False
    """Its prompt report and prompt log-probs reached the dialect; those of later attempts are of no interest."""
    catching_up: bool = False
    """A RESUME is under way: rows beyond the next offset are expected and ignored."""

    @property
    def is_open(self) -> bool:
        return self.finish is None and not self.stopped


def tokens_to_skip(num_known: int, offset: int) -> int | None:
    """Return how many leading tokens of a row at `offset` are known already; None when tokens before it are missing."""
    return num_known - offset if offset <= num_known else None


class ResumeRecord:
    """State of one request that outlives engines; `attempt` numbers its submissions."""

    def __init__(self, request: EngineRequest, wire_rid: str) -> None:
        self.request = request
        self.wire_rid = wire_rid
        self.sequences = [SequenceRecord(index, seed) for index, seed in enumerate(request.seeds)]
        self.attempt = 0
        self.output_hash = ""
        """Set with the first token: from then on only an engine with an equal one may continue."""
        self._prompt = pack_ids(request.prompt_ids)
        self._num_since_submit = 0
        self._num_barren_deaths = 0

    @property
    def open_sequences(self) -> list[SequenceRecord]:
        return [sequence for sequence in self.sequences if sequence.is_open]

    @property
    def wants_logprobs(self) -> bool:
        """RESUME brings tokens only, so such a request is resubmitted where others are resumed."""
        sampling = self.request.sampling
        return sampling.logprobs is not None or bool(sampling.logprob_token_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and any(not sequence.has_report for sequence in self.open_sequences)

    @property
    def num_context_tokens(self) -> int:
        """Tokens an engine has to have KV for: the prompt and the longest output of an open sequence."""
        return len(self.request.prompt_ids) + max((len(s.emitted) for s in self.open_sequences), default=0)

    def context_hashes(self, block_size: int) -> list[bytes]:
        """Return the block hashes of the prompt, and of the output when one sequence alone is open."""
        still_open = self.open_sequences
        output: Sequence[int] = still_open[0].emitted if len(still_open) == 1 else ()
        root = namespace_root(self.request.lora_digest, self.request.cache_salt)
        return chain_hashes(self._prompt + pack_ids(output), block_size, root)

    def submission(
        self, engine_boot: str, *, remaining_s: float | None, hints: tuple[PrefillHint, ...], force_remote: bool
    ) -> Submit:
        """Return the next SUBMIT: the open sequences with what they have emitted, as a new attempt."""
        self.attempt += 1
        self._num_since_submit = 0
        request = self.request
        sampling = request.sampling
        if sampling.prompt_logprobs is not None and not self.needs_prompt_logprobs:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Submit(
            rid=self.wire_rid,
            attempt=self.attempt,
            engine_boot=engine_boot,
            prompt_ids=self._prompt,
            sequences=[
                SubmitSequence(index=s.index, seed=s.seed, emitted_ids=pack_ids(s.emitted)) for s in self.open_sequences
            ],
            sampling=sampling,
            grammar=request.grammar,
            lora_digest=request.lora_digest,
            cache_salt=request.cache_salt,
            priority=request.priority,
            remaining_s=remaining_s,
            prefill_hints=list(hints),
            force_remote=force_remote,
            traceparent=request.traceparent,
        )

    def emitted(self, sequence: SequenceRecord, ids: list[int], output_hash: str) -> None:
        """Record new tokens and which kind of engine made them."""
        sequence.emitted += ids
        self._num_since_submit += len(ids)
        self.output_hash = output_hash

    def may_retry_after_death(self) -> bool:
        """Count the death of the engine that had the last submission; False when this request seems to be the cause."""
        self._num_barren_deaths = self._num_barren_deaths + 1 if self._num_since_submit == 0 else 0
        self._num_since_submit = 0
        return self._num_barren_deaths < MAX_BARREN_DEATHS
