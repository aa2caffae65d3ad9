"""A scripted engine over real ZeroMQ, and a router core dialling it: what engine and routing tests are made of.

Token number p of a sequence is `token_at(seed, p)`, whichever engine makes it, so "the same tokens continue" is checkable.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvferry_engine.wire import sockets
from kvferry_engine.wire.assets import AssetBundle, encode_bundle
from kvferry_engine.wire.messages import (
    Abort,
    Accepted,
    Admin,
    AdminResult,
    Assets,
    AssetsRequest,
    Beat,
    Body,
    Bye,
    Drain,
    Envelope,
    Events,
    EventsSnapshot,
    Finish,
    FinishReason,
    Handoff,
    Hello,
    KVLayout,
    Load,
    ModelInfo,
    PeerKind,
    PromptReport,
    RejectCode,
    Rejected,
    Resume,
    Resumed,
    Role,
    Sampling,
    SetRole,
    State,
    Step,
    Submit,
    TokenLogprobs,
    decode,
    encode,
)
from kvferry_engine.wire.packing import pack_ids, unpack_ids
from kvferry_server.engines.client import RouterIdentity
from kvferry_server.engines.discovery import Resolver, Sources, resolve
from kvferry_server.engines.timings import LinkTimings
from kvferry_server.requests import EngineRequest, Generation
from kvferry_server.routing.core import RouterCore, build_core
from kvferry_server.settings import RouterSettings

FAST = LinkTimings(
    beat_s=0.03,
    suspect_s=0.25,
    dead_s=0.7,
    connect_s=2.0,
    resume_grace_s=0.4,
    backoff_min_s=0.005,
    backoff_max_s=0.05,
    refused_hello_s=0.05,
)


def _tokenizer_json() -> bytes:
    """A tokenizer of 1000 words, t0 to t999."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(1000)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    return str(tokenizer.to_str()).encode()


BUNDLE = AssetBundle(tokenizer_json=_tokenizer_json(), tasks=["generate"], max_model_len=4096)
DIGEST, BUNDLE_BYTES = encode_bundle(BUNDLE)

_boots = random.Random(1)


def token_at(seed: int, position: int) -> int:
    """Token `position` of the output of a sequence."""
    return (seed * 31 + position * 7 + 3) % 1000


def tokens_of(seed: int, num_tokens: int) -> list[int]:
    return [token_at(seed, position) for position in range(num_tokens)]


def model_info(**changes: Any) -> ModelInfo:
    info = ModelInfo(
        names=["tiny"],
        root="tiny",
        max_model_len=4096,
        vocab_size=1000,
        tasks=["generate"],
        dtype="float32",
        layout=KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"),
        num_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        tensor_parallel=1,
        weights_id="w",
        pair_hash="pair",
        output_hash="out",
        assets_digest=DIGEST,
        assets_bytes=len(BUNDLE_BYTES),
    )
    return msgspec.structs.replace(info, **changes)


@dataclass
class FakeSequence:
    router: bytes
    rid: str
    attempt: int
    index: int
    slot: int
    seed: int
    max_tokens: int
    emitted: list[int]
    logprobs: bool
    finish: Finish | None = None
    started: bool = False


@dataclass
class Script:
    """What the engine does wrong, or differently; change it while it runs."""

    reject: Rejected | None = None
    """Answer every SUBMIT with this."""
    silent: bool = False
    """Answer no SUBMIT at all."""
    crash_on_submit: bool = False
    hold: bool = False
    """Accept, but make no tokens."""
    duplicate_steps: bool = False
    stray_steps: bool = False
    """Also send STEPs with wrong tokens to another boot, and rows for unknown slots."""
    drop_steps: int = 0
    """Forget to send this many STEPs."""
    forget: bool = False
    """Answer RESUME with known=False."""
    corrupt_assets: bool = False
    finish_reason: FinishReason = FinishReason.LENGTH


class FakeEngine:
    """One engine on a loopback port; `await start()`, then script it."""

    def __init__(
        self,
        name: str = "decode-0",
        *,
        role: Role = Role.BOTH,
        keys: sockets.WireKeys | None = None,
        service: str = "",
        info: ModelInfo | None = None,
        step_s: float = 0.001,
    ) -> None:
        self.name = name
        self.role = role
        self.keys = keys
        self.service = service
        self.info = info or model_info()
        self.script = Script()
        self.step_s = step_s
        self.boot = ""
        self.port = 0
        self.draining = False
        self.cordoned = False
        self.state_version = 0
        self.load = Load(free_blocks=self.info.num_blocks)
        self.sequences: dict[int, FakeSequence] = {}
        self.received: list[Body] = []
        self.blocks: set[bytes] = set()
        self.events_number = 0
        self.version = (1, 1)
        self.frozen = False
        self._next_slot = 0
        self._routers: dict[bytes, tuple[str, int]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._socket: zmq.asyncio.Socket | None = None
        self._context = zmq.asyncio.Context()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def got(self, kind: type[Any]) -> list[Any]:
        return [body for body in self.received if isinstance(body, kind)]

    @property
    def open_sequences(self) -> list[FakeSequence]:
        return [s for s in self.sequences.values() if s.finish is None]

    # --- life

    async def start(self, *, keep_boot: bool = False) -> FakeEngine:
        if not keep_boot:
            self.boot = f"{self.name}-{_boots.getrandbits(32):08x}"
            self.sequences = {}
        self._open()
        self._tasks = [asyncio.create_task(part()) for part in (self._listen, self._beats, self._steps)]
        return self

    def _open(self) -> None:
        socket = self._context.socket(zmq.ROUTER)
        sockets.prepare(zmq.Socket.shadow(socket.underlying))
        if self.keys is not None:
            sockets.secure_server(zmq.Socket.shadow(socket.underlying), self.keys)
        if self.port:
            for _ in range(200):
                try:
                    socket.bind(f"tcp://{self.address}")
                    break
                except zmq.ZMQError:
                    import time

                    time.sleep(0.005)
        else:
            self.port = socket.bind_to_random_port("tcp://127.0.0.1")
        self._socket = socket
        self._routers = {}

    async def crash(self) -> None:
        """The process is gone: sockets close, nothing is said."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks = []
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    async def restart(self) -> None:
        await self.crash()
        await self.start()

    async def cut(self) -> None:
        """Lose all connections, keep the process and its sequences."""
        await self.crash()
        await self.start(keep_boot=True)

    async def leave(self) -> None:
        """Say BYE and end."""
        for router in list(self._routers):
            self._send(router, Bye())
        await asyncio.sleep(0.02)
        await self.crash()

    def freeze(self) -> None:
        """Stop doing anything; the connection stays up."""
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False

    async def close(self) -> None:
        await self.crash()
        self._context.term()

    # --- talking

    def _send(self, router: bytes, body: Body, *, dst: str | None = None) -> None:
        if router not in self._routers or self._socket is None:
            return
        boot, number = self._routers[router]
        if dst is None:
            self._routers[router] = (boot, number + 1)
        data = encode(Envelope(src=self.boot, dst=boot if dst is None else dst, seq=number, body=body))
        sent: Any = self._socket.send_multipart([router, data], flags=zmq.NOBLOCK)
        if sent.exception() is not None:
            self._routers.pop(router, None)

    def broadcast(self, body: Body) -> None:
        for router in list(self._routers):
            self._send(router, body)

    def hello(self) -> Hello:
        return Hello(
            kind=PeerKind.ENGINE,
            boot=self.boot,
            name=self.name,
            version_min=self.version[0],
            version_max=self.version[1],
            service=self.service,
            role=self.role,
            address=self.address,
            model=self.info,
            state_version=self.state_version,
            draining=self.draining,
        )

    async def _listen(self) -> None:
        assert self._socket is not None
        while True:
            router, data = await self._socket.recv_multipart()
            while self.frozen:
                await asyncio.sleep(0.005)
            envelope = decode(data)
            if isinstance(envelope.body, Hello):
                self._routers[router] = (envelope.src, 0)
                self.received.append(envelope.body)
                self._send(router, self.hello())
            elif envelope.dst == self.boot and router in self._routers:
                await self._handle(router, envelope.body)

    async def _beats(self) -> None:
        while True:
            if not self.frozen:
                self.broadcast(self.beat())
            await asyncio.sleep(FAST.beat_s)

    def beat(self) -> Beat:
        return Beat(load=self.load, role=self.role, draining=self.draining, cordoned=self.cordoned)

    async def _handle(self, router: bytes, body: Body) -> None:
        if not isinstance(body, Beat):
            self.received.append(body)
        match body:
            case Submit():
                await self._submitted(router, body)
            case Abort():
                for sequence in list(self.sequences.values()):
                    if sequence.rid == body.rid and (body.indices is None or sequence.index in body.indices):
                        del self.sequences[sequence.slot]
            case Resume():
                self._resume(router, body)
            case AssetsRequest():
                data = BUNDLE_BYTES[body.offset : body.offset + 1000]
                if self.script.corrupt_assets:
                    data = bytes(len(data))
                self._send(
                    router, Assets(digest=body.digest, offset=body.offset, total_bytes=len(BUNDLE_BYTES), data=data)
                )
            case EventsSnapshot():
                self._send(
                    router, Events(number=self.events_number, stored=b"".join(sorted(self.blocks)), snapshot=True)
                )
            case SetRole():
                self.role = body.role
                self._send(router, self.beat())
            case Admin():
                ok = body.operation != "fail"
                self._send(router, AdminResult(id=body.id, ok=ok, message=body.operation, data=body.arguments))
            case State():
                self.state_version = body.version
                self._send(router, State(version=body.version))
            case _:
                pass

    def store(self, blocks: Iterable[bytes], *, skip_number: bool = False) -> None:
        """Put blocks in the prefix cache and tell it."""
        new = list(blocks)
        self.blocks.update(new)
        self.events_number += 2 if skip_number else 1
        self.broadcast(Events(number=self.events_number, stored=b"".join(new)))

    def drain(self) -> None:
        """SIGTERM: no new work, hand over what runs; goes on until ABORT."""
        self.draining = True
        self.broadcast(Drain())
        for rid, attempt, router in {(s.rid, s.attempt, s.router) for s in self.open_sequences}:
            self._send(router, Handoff(rid=rid, attempt=attempt))

    # --- requests

    async def _submitted(self, router: bytes, submit: Submit) -> None:
        if self.script.crash_on_submit:
            await self.crash()
            raise asyncio.CancelledError
        if self.script.silent:
            return
        if self.script.reject is not None or self.draining:
            rejected = self.script.reject or Rejected(rid="", attempt=0, code=RejectCode.DRAINING, message="draining")
            self._send(router, msgspec.structs.replace(rejected, rid=submit.rid, attempt=submit.attempt))
            return
        known = [s for s in self.sequences.values() if (s.rid, s.attempt) == (submit.rid, submit.attempt)]
        if not known:
            for sequence in submit.sequences:
                slot, self._next_slot = self._next_slot, self._next_slot + 1
                self.sequences[slot] = FakeSequence(
                    router=router,
                    rid=submit.rid,
                    attempt=submit.attempt,
                    index=sequence.index,
                    slot=slot,
                    seed=sequence.seed,
                    max_tokens=submit.sampling.max_tokens,
                    emitted=unpack_ids(sequence.emitted_ids),
                    logprobs=submit.sampling.logprobs is not None,
                )
                known.append(self.sequences[slot])
        self._send(router, Accepted(rid=submit.rid, attempt=submit.attempt, slots=[s.slot for s in known]))

    def _resume(self, router: bytes, resume: Resume) -> None:
        sequence = next(
            (
                s
                for s in self.sequences.values()
                if (s.rid, s.attempt, s.index) == (resume.rid, resume.attempt, resume.index)
            ),
            None,
        )
        answer = Resumed(rid=resume.rid, attempt=resume.attempt, index=resume.index, known=False)
        if sequence is not None and not self.script.forget:
            answer.known = True
            answer.slot = sequence.slot
            answer.from_k = resume.from_k
            answer.token_ids = pack_ids(sequence.emitted[resume.from_k :])
            answer.finish = sequence.finish
        self._send(router, answer)

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if not self.frozen and not self.script.hold:
                self.step()

    def step(self) -> None:
        """Make one token per open sequence and send one STEP per router."""
        by_router: dict[bytes, list[FakeSequence]] = {}
        for sequence in self.open_sequences:
            by_router.setdefault(sequence.router, []).append(sequence)
        for router, rows in by_router.items():
            self._step_rows(router, rows)

    def _step_rows(self, router: bytes, rows: list[FakeSequence]) -> None:
        step = Step(slots=b"", counts=b"", offsets=b"", token_ids=b"")
        offsets, tokens = [], []
        for row in rows:
            offsets.append(len(row.emitted))
            token = token_at(row.seed, len(row.emitted))
            row.emitted.append(token)
            tokens.append(token)
            if not row.started:
                row.started = True
                step.reports[row.slot] = PromptReport(num_prompt_tokens=3, prefill_engine="")
            if row.logprobs:
                step.logprobs[row.slot] = [TokenLogprobs(ids=pack_ids([token]), values=[-0.5], ranks=pack_ids([1]))]
            if len(row.emitted) >= row.max_tokens:
                row.finish = Finish(reason=self.script.finish_reason)
                step.finished[row.slot] = row.finish
        step.slots = pack_ids(row.slot for row in rows)
        step.counts = pack_ids([1] * len(rows))
        step.offsets = pack_ids(offsets)
        step.token_ids = pack_ids(tokens)
        if self.script.drop_steps > 0:
            self.script.drop_steps -= 1
            return
        self._send(router, step)
        if self.script.duplicate_steps:
            self._send(router, step)
        if self.script.stray_steps:
            wrong = msgspec.structs.replace(step, token_ids=pack_ids([999] * len(rows)), finished={})
            self._send(router, wrong, dst="somebody-else")
            self._send(router, msgspec.structs.replace(wrong, slots=pack_ids(10_000 + r.slot for r in rows)))


# --- the router side ----------------------------------------------------------------------------------------------------


@dataclass
class Harness:
    """A router core and the engines it dials; everything closes with `running`."""

    core: RouterCore
    engines: list[FakeEngine]
    boot: str
    num_rids: int = field(default=0)

    def request(self, *, seeds: list[int] | None = None, max_tokens: int = 20, **changes: Any) -> EngineRequest:
        self.num_rids += 1
        sampling = changes.pop("sampling", None) or Sampling(max_tokens=max_tokens)
        prompt = changes.pop("prompt_ids", [1, 2, 3])
        rid = changes.pop("rid", f"r{self.num_rids}")
        return EngineRequest(rid=rid, prompt_ids=prompt, sampling=sampling, seeds=seeds or [self.num_rids], **changes)

    async def usable(self, count: int) -> None:
        await until(lambda: len(self.core.registry.usable()) == count)

    def client(self, engine: FakeEngine) -> Any:
        return self.core.registry.engines[engine.address]


@contextlib.asynccontextmanager
async def running(
    *engines: FakeEngine,
    start: bool = True,
    timings: LinkTimings = FAST,
    keys: tuple[sockets.WireKeys, ...] = (),
    service: str = "",
    resolver: Resolver = resolve,
    sources: Sources | None = None,
    usable: int | None = None,
    on_refused: Callable[[str], None] = lambda limit: None,
    **settings: Any,
) -> AsyncIterator[Harness]:
    """Start engines and a router; `usable` engines (all by default) must be usable before the body runs."""
    if start:
        for engine in engines:
            await engine.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    boot = f"router-{random.randrange(1 << 32):08x}"
    settings.setdefault("submit_timeout", 10.0)
    core = build_core(
        RouterSettings(**settings),
        sources=sources or Sources(frozenset(engine.address for engine in engines)),
        identity=RouterIdentity(boot=boot, name="router", service=service),
        context=context,
        keys=keys,
        timings=timings,
        resolver=resolver,
        randomness=random.Random(3),
        on_refused=on_refused,
    )
    core.start()
    harness = Harness(core, list(engines), boot)
    try:
        await harness.usable(len(engines) if usable is None else usable)
        yield harness
    finally:
        await core.close()
        context.term()
        for engine in engines:
            await engine.close()


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Wait for a condition, checked every few milliseconds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def collect(generation: Generation) -> dict[int, list[int]]:
    """Read a generation to its end and close it; tokens by sequence."""
    tokens: dict[int, list[int]] = {}
    try:
        async for event in generation.events():
            tokens.setdefault(event.index, []).extend(event.token_ids)
    finally:
        await generation.aclose()
    return tokens


def in_background(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(work)
