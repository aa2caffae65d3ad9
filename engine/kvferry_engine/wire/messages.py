"""Every message between routers and engines and between engines: typed, tagged, msgpack, no pickle.

Structs grow by optional fields only, so that version N and N - 1 understand each other; unknown fields are ignored. An
`Envelope` names both processes by boot id: a message for a process that has since restarted is dropped by the receiver
(a DEALER's queue survives the restart of its peer). Token ids travel as packed columns (`packing`).

Reading order follows a request: Hello, Submit, Accepted, (Prefill .. Close between engines), Step, Finish.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

WIRE_VERSION_MIN = 1
WIRE_VERSION_MAX = 1

BEAT_INTERVAL_S = 0.5
SUSPECT_AFTER_S = 2.0
DEAD_AFTER_S = 8.0


class Role(StrEnum):
    """What an engine prefers to do; a weight in the router's choice, never a reason for an engine to refuse work."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class PeerKind(StrEnum):
    ROUTER = "router"
    ENGINE = "engine"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class RejectCode(StrEnum):
    """Why an engine does not take a request. The router maps each to an HTTP status in one place."""

    INVALID = "invalid"
    """The request can never run here (ids outside the vocabulary, too long): 400."""
    BUSY = "busy"
    """No room now; another engine or a later try may take it: next engine, then 503."""
    DRAINING = "draining"
    STALE = "stale"
    """Wrong boot id, or an attempt older than one already seen."""
    UNSUPPORTED = "unsupported"
    """This engine lacks the feature (for example grammars): 501."""


class Message(msgspec.Struct, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of everything that travels in an `Envelope`."""


# --- identity -------------------------------------------------------------------------------------------------------


class KVLayout(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """Shape of the KV cache of a whole engine (all ranks together)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str


class ModelInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What an engine serves. `tasks` decide which HTTP routes exist; digests decide who may work with whom."""

    names: list[str]
    """Served names; the first one is reported in responses."""
    root: str
    """The model argument as given, for `/v1/models`."""
    max_model_len: int
    vocab_size: int
    tasks: list[str]
    dtype: str
    layout: KVLayout
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel: int
    weights_id: str
    pair_hash: str
    output_hash: str
    assets_digest: str
    assets_bytes: int
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"

    @property
    def capacity_tokens(self) -> int:
        """KV capacity of the engine in tokens."""
        return self.num_blocks * self.layout.block_size


class Hello(Message, tag="hello"):
    """First message in both directions of every connection; the only one accepted with an empty destination boot."""

    kind: PeerKind
    boot: str
    """Random per process start; the epoch of everything this process does."""
    name: str
    version_min: int = WIRE_VERSION_MIN
    version_max: int = WIRE_VERSION_MAX
    service: str = ""
    """namespace/name/uid of the LLMService; both sides must name the same one when both name one."""
    role: Role = Role.BOTH
    address: str = ""
    """host:port other engines dial."""
    store_address: str = ""
    """host:port of this engine's TCPStore (pair groups)."""
    model: ModelInfo | None = None
    state_version: int = 0
    draining: bool = False


class Load(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An engine's load as of its last step; token counts are uncached prompt tokens."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens queued or half prefilled that must still be computed here."""
    free_blocks: int = 0
    """Blocks that could be taken now: never used, freed, or evictable cache."""
    used_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    """Measured rate of prompt computation; 0 while unknown."""
    decode_step_s: float = 0.0
    """Moving average of a step without prompt tokens."""
    transfer_bytes_per_s: float = 0.0
    staging_slots_used: int = 0
    step_age_s: float = 0.0
    """Seconds since the core loop last turned, idle turns included; only in BEAT."""


class Counters(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Monotonic totals of an engine since its boot; the router sums them for its own /metrics."""

    prompt_tokens: int = 0
    prompt_tokens_local_compute: int = 0
    prompt_tokens_local_cache: int = 0
    prompt_tokens_remote: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    transfers_in: int = 0
    transfers_out: int = 0
    transfer_failures: int = 0
    transfer_bytes_in: int = 0
    transfer_bytes_out: int = 0
    tombstones: int = 0
    corrupt_chunks: int = 0
    audits: int = 0
    leaked_blocks: int = 0
    steps: int = 0


class Beat(Message, tag="beat"):
    """Sent every `BEAT_INTERVAL_S` in both directions, also while a step is running."""

    load: Load | None = None
    counters: Counters | None = None
    role: Role | None = None
    draining: bool = False
    cordoned: bool = False


class Bye(Message, tag="bye"):
    """The sender stops on purpose; nothing more will come from this boot."""


class Drain(Message, tag="drain"):
    """Engine to routers: send no new work, hand over what runs."""


class SetRole(Message, tag="set_role"):
    role: Role


# --- requests -------------------------------------------------------------------------------------------------------


class RepetitionDetection(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """Stop a sequence whose output ends with `min_count` repeats of a pattern of the given sizes (tokens)."""

    max_pattern_size: int = 0
    min_pattern_size: int = 1
    min_count: int = 0


class Sampling(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """Sampling parameters after the router resolved text to ids; ranges as in the HTTP reference, section 14.

    Stop strings are not here: the router owns text and finds them.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: list[int] = []
    """Ends with reason stop and no stop_reason; empty when ignore_eos."""
    stop_token_ids: list[int] = []
    """Ends with reason stop and the id as stop_reason."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] | None = None
    logprobs: int | None = None
    """Number of alternatives beside the sampled token; -1 = whole vocabulary."""
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetection | None = None


class GrammarSpec(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """What output must match; `kind` is json_schema, json_object, regex, choice, grammar or structural_tag."""

    kind: str
    text: str


class SubmitSequence(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One of the n sequences of a request. `emitted_ids` is output that already reached the router (resume)."""

    index: int
    seed: int
    emitted_ids: bytes = b""


class PrefillHint(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """A prefill engine the router proposes, best first."""

    address: str
    boot: str
    cached_tokens: int = 0


class Submit(Message, tag="submit"):
    """Router to decode engine: run this request. Idempotent on (rid, attempt, engine_boot).

    Emitted ids are output (penalties, min/max tokens, bad words, grammar replay), never prompt.
    """

    rid: str
    attempt: int
    engine_boot: str
    prompt_ids: bytes
    sequences: list[SubmitSequence]
    sampling: Sampling
    grammar: GrammarSpec | None = None
    lora_digest: str = ""
    cache_salt: str = ""
    priority: int = 0
    remaining_s: float | None = None
    prefill_hints: list[PrefillHint] = []
    force_remote: bool = False
    """disaggregation mode Always: ferry whenever there is a full block and a usable hint."""
    traceparent: str = ""


class Accepted(Message, tag="accepted"):
    """`slots[i]` names sequence `sequences[i]` in STEP columns of this connection."""

    rid: str
    attempt: int
    slots: list[int]


class Rejected(Message, tag="rejected"):
    rid: str
    attempt: int
    code: RejectCode
    message: str
    param: str | None = None
    retry_after_s: float = 0.0


class Abort(Message, tag="abort"):
    """Router to engine: stop sequences of a request (`indices` None = all). Idempotent; unknown ids are ignored."""

    rid: str
    indices: list[int] | None = None


class TokenLogprobs(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Log-probabilities at one position: the token itself first, then alternatives by rank.

    `ids`, `ranks`: packed int32; `values`: natural logs as floats. `ranks` are 1-based in the whole vocabulary.
    """

    ids: bytes
    values: list[float]
    ranks: bytes


class Finish(msgspec.Struct, omit_defaults=True, kw_only=True):
    reason: FinishReason
    stop_reason: int | str | None = None
    message: str = ""


class PromptReport(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How a sequence's prompt was filled, told with its first token. Times in seconds."""

    num_prompt_tokens: int
    cached_tokens: int = 0
    """Found in this engine's own prefix cache."""
    remote_tokens: int = 0
    """Ferried from a prefill engine."""
    prefill_engine: str = ""
    """Name of that engine."""
    remote_bytes: int = 0
    local_reason: str = ""
    """Why the prompt was not ferried: short, no_hint, cached, prompt_logprobs, prefill_failed, ..."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    """Exposed transfer: waiting for KV with nothing else to do."""


class Step(Message, tag="step"):
    """Tokens of one engine step for one router, in columns of equal length n (one row per sequence with output).

    `slots`, `counts`, `offsets`: packed int32 [n]; `token_ids`: packed int32 [sum(counts)]. `offsets[i]` is the index of the
    row's first token in the sequence's output (emitted ids counted), so duplicates and gaps are visible. The sparse maps are
    keyed by slot.
    """

    slots: bytes
    counts: bytes
    offsets: bytes
    token_ids: bytes
    finished: dict[int, Finish] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
    reports: dict[int, PromptReport] = {}
    load: Load | None = None


class Resume(Message, tag="resume"):
    """Router to engine after a reconnect: send sequence `index` of `rid` again from output token `from_k`."""

    rid: str
    attempt: int
    index: int
    from_k: int


class Resumed(Message, tag="resumed"):
    """Answer to Resume. `known` False: this engine has no such sequence, resubmit it elsewhere."""

    rid: str
    attempt: int
    index: int
    known: bool
    slot: int = -1
    from_k: int = 0
    token_ids: bytes = b""
    finish: Finish | None = None


class Handoff(Message, tag="handoff"):
    """Draining engine to router: continue this request elsewhere, with me as prefill hint. The engine goes on until ABORT."""

    rid: str
    attempt: int


# --- state and assets -------------------------------------------------------------------------------------------------


class Events(Message, tag="events"):
    """Prefix-cache changes since the last message. A gap in `number` asks for a snapshot (`EventsSnapshot`)."""

    number: int
    stored: bytes = b""
    """Concatenated 16-byte block hashes."""
    removed: bytes = b""
    snapshot: bool = False
    """True: `stored` is everything; forget what was known."""


class EventsSnapshot(Message, tag="events_snapshot"):
    """Router to engine: send all stored hashes."""


class AssetsRequest(Message, tag="assets_request"):
    digest: str
    offset: int = 0


class Assets(Message, tag="assets"):
    """One piece of the asset bundle (msgpack of `assets.AssetBundle`)."""

    digest: str
    offset: int
    total_bytes: int
    data: bytes


class Admin(Message, tag="admin"):
    """Router to engine: an operation of the closed list (pause, sleep, weights, LoRA, profile, reset)."""

    id: str
    operation: str
    arguments: dict[str, Any] = {}


class AdminResult(Message, tag="admin_result"):
    id: str
    ok: bool
    message: str = ""
    data: dict[str, Any] = {}


class State(Message, tag="state"):
    """Versioned state of the service (adapters, weights version, paused, asleep); the highest version wins."""

    version: int
    data: dict[str, Any] = {}


# --- transfer: between the rank 0s of a receiver (decode) and a sender (prefill) ---------------------------------------


class Join(Message, tag="join"):
    """Receiver to sender: build pair groups with me. One group per (sender rank, receiver rank) in `ranks`."""

    epoch: int
    store_address: str
    ranks: list[tuple[int, int]]
    pair_hash: str
    transport: str
    receiver_tensor_parallel: int = 1
    receiver_address: str = ""
    slot_bytes: int = 0
    """Size of the receiver's staging slots, the trailer not counted; both ends use the smaller of theirs."""


class JoinOk(Message, tag="join_ok"):
    epoch: int
    ok: bool
    transport: str = ""
    sender_tensor_parallel: int = 1
    message: str = ""
    slot_bytes: int = 0


class Prefill(Message, tag="prefill"):
    """Receiver to sender: compute the full blocks of this prompt from token `have` on and ferry them."""

    tid: str
    prompt_ids: bytes
    have: int
    """Tokens the receiver already holds, a multiple of the block size."""
    upto: int
    """Tokens wanted in all, a multiple of the block size, at most len(prompt) - 1."""
    root: bytes = b""
    """Namespace root of the block hashes (LoRA, salt, media)."""
    lora_digest: str = ""
    priority: int = 0
    remaining_s: float | None = None


class Queued(Message, tag="queued"):
    tid: str
    est_start_s: float = 0.0


class Busy(Message, tag="busy"):
    tid: str
    retry_after_s: float = 0.0


class Reject(Message, tag="reject"):
    tid: str
    message: str


class Start(Message, tag="start"):
    """Sender to receiver just before the first chunk runs: reserve room now."""

    tid: str
    ready_tokens: int = 0


class Grant(Message, tag="grant"):
    """Receiver to sender: blocks are reserved and the pair groups are open. Credits belong to pairs and come in `Credit`."""

    tid: str


class Chunk(Message, tag="chunk"):
    """Sender to receiver: one payload is being sent.

    Blocks, layers and heads are half-open ranges; blocks count from the prompt's start.
    """

    tid: str
    seq: int
    """Chunk number within (tid, sender rank, receiver rank), from 0."""
    pair_seq: int
    """Payload number within the pair; every announced number is received exactly once."""
    p_rank: int
    d_rank: int
    block_start: int
    block_stop: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    num_bytes: int
    """Payload without the trailer."""
    epoch: int = 0
    """Of the pair groups; a message of another epoch is dropped (here and in Posted and Credit)."""


class Posted(Message, tag="posted"):
    """Receiver to sender (NCCL only): the receive of this payload is posted, launch the send."""

    pair_seq: int
    p_rank: int
    d_rank: int
    epoch: int = 0


class Credit(Message, tag="credit"):
    """Receiver to sender: `credits` staging slots may be filled for this pair."""

    p_rank: int
    d_rank: int
    credits: int
    epoch: int = 0
    returned: bool = False
    """True: sender to receiver, these credits are not needed now."""


class Done(Message, tag="done"):
    """Sender to receiver: everything asked for has been announced."""

    tid: str
    num_chunks: int
    num_tokens: int
    computed_tokens: int = 0
    cached_tokens: int = 0
    compute_s: float = 0.0
    """From START to the last token having KV: what of the wait was not transfer."""


class Close(Message, tag="close"):
    """Receiver to sender: everything has arrived, forget the transfer."""

    tid: str


class TransferAbort(Message, tag="transfer_abort"):
    """Either side: stop this transfer. Terminal; wins over Done."""

    tid: str
    reason: str
    retry: bool = False
    """True: no room right now, asking again later is welcome."""


class AbortAck(Message, tag="abort_ack"):
    tid: str


class PairClosed(Message, tag="pair_closed"):
    """Either side: the pair groups of this epoch are gone; the receiver may join again with epoch + 1."""

    epoch: int
    reason: str
    by_receiver: bool = True
    """Which end of the pair speaks; two engines may have pairs in both directions."""


Body = (
    Hello | Beat | Bye | Drain | SetRole
    | Submit | Accepted | Rejected | Abort | Step | Resume | Resumed | Handoff
    | Events | EventsSnapshot | AssetsRequest | Assets | Admin | AdminResult | State
    | Join | JoinOk | Prefill | Queued | Busy | Reject | Start | Grant | Chunk | Posted | Credit | Done | Close
    | TransferAbort | AbortAck | PairClosed
)  # fmt: skip


class Envelope(msgspec.Struct, array_like=True):
    """One ZeroMQ frame: who speaks, to which boot, the running number of the connection, and the message."""

    src: str
    dst: str
    seq: int
    body: Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """Return the msgpack bytes of an envelope."""
    return _encoder.encode(envelope)


def decode(data: bytes) -> Envelope:
    """Parse one frame. Raises msgspec.DecodeError (or its ValidationError) on anything that is not a known message."""
    return _decoder.decode(data)
