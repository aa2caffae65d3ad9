"""A sequence: one of the n outputs of a request, with its tokens, its place in the KV cache and its progress.

Only the scheduler changes the fields of a sequence after it was added; runner, sampler and transfer read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvferry_engine.wire.messages import Finish, Sampling

Int32 = npt.NDArray[np.int32]


class Purpose(StrEnum):
    GENERATE = "generate"
    PREFILL = "prefill"
    """Compute prompt blocks for another engine; nothing is sampled."""


class Status(StrEnum):
    REMOTE = "remote"
    """KV is being ferried in; not schedulable."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """State of one sequence.

    `tokens` int32 [capacity]: prompt, then output; `num_tokens` of them are known. `num_computed` tokens have KV in `blocks`
    (int32 block ids, in order). Tokens known but not computed are what a step may work on. `generation` changes at
    preemption, so that results of an older life are recognised and dropped.
    """

    rid: str
    index: int
    handle: int
    """Unique in this engine; the slot of STEP columns."""
    tokens: Int32
    num_prompt: int
    num_tokens: int
    sampling: Sampling
    seed: int
    root: bytes
    """Namespace root of the block hashes."""
    purpose: Purpose = Purpose.GENERATE
    upto: int = 0
    """PREFILL: compute this many tokens, then finish."""
    leader: Sequence | None = None
    """n > 1: wait until this sibling has computed the prompt, then share its blocks."""
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    origin: str = ""
    """Connection (router boot) that owns the request."""

    status: Status = Status.WAITING
    num_computed: int = 0
    num_cached: int = 0
    """Prompt tokens found in the local prefix cache at first admission."""
    num_remote: int = 0
    """Prompt tokens ferried in."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks known so far, in order; grown by the scheduler."""
    num_indexed: int = 0
    """Leading blocks that are in the prefix index."""
    generation: int = 0
    num_inflight: int = 0
    """Launched steps with this sequence that have not retired (lookahead)."""
    num_placeholders: int = 0
    """Tokens at the end of the sequence that are sampled but not yet known to the CPU (lookahead)."""
    num_preemptions: int = 0
    tokens_since_preemption: int = 0
    """Progress since the last preemption: tokens sampled, or tokens computed by a PREFILL sequence. Meaningless before one."""
    num_prompt_logprobs: int = 0
    """Prompt positions whose log-probs were reported (a preempted prompt is computed again, but told once)."""
    slot: int = -1
    """Row in the scheduler's persistent tables while RUNNING, else -1; `StepPlan.slots` names the same rows."""
    cache_epoch: int = -1
    """Prefix-cache epoch in which the blocks were taken; -1: the cache was never asked. Blocks of an old epoch stay private."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finish: Finish | None = None

    @property
    def num_output(self) -> int:
        """Known output tokens, emitted ones of an earlier attempt included."""
        return self.num_tokens - self.num_prompt

    def ids(self, start: int, stop: int) -> Int32:
        """View of tokens [start, stop)."""
        return self.tokens[start:stop]
