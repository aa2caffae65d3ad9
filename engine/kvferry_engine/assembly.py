"""Puts an engine together: model and runner, scheduler and core; for a served engine also wire, transfer and health.

The one place that knows every part. `build_parts` is the core alone (the SDK runs it in its own process), `build_engine`
the whole process that `main` runs.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from kvferry_engine.config import EngineConfig, TransportName
from kvferry_engine.control import Control, EngineIdentity
from kvferry_engine.core import CoreLimits, EngineCore
from kvferry_engine.errors import ConfigError
from kvferry_engine.health import HealthServer, Probe
from kvferry_engine.kv_cache.auditor import audit, leaked_blocks
from kvferry_engine.kv_cache.block_pool import BlockPool
from kvferry_engine.kv_cache.prefix_index import PrefixIndex
from kvferry_engine.loader.identity import output_hash, pair_hash
from kvferry_engine.loader.progress import load_progress
from kvferry_engine.loader.source import open_source
from kvferry_engine.metrics import EngineCollector
from kvferry_engine.network import Network
from kvferry_engine.rank_transfer import WorkerSetup
from kvferry_engine.runner.build import BuiltRunner, build_runner
from kvferry_engine.scheduler.config import SchedulerConfig
from kvferry_engine.scheduler.scheduler import Scheduler
from kvferry_engine.transfer.pairs import Stores, host_store
from kvferry_engine.transfer.ports import TransferContext, TransferSettings
from kvferry_engine.transfer.protocol.slices import head_layer_bytes
from kvferry_engine.transfer.rank_worker import RankWorker
from kvferry_engine.transfer.ranks import Ranks
from kvferry_engine.transfer.service import TransferService
from kvferry_engine.transfer.transport import nccl
from kvferry_engine.transfer.transport.base import Connector
from kvferry_engine.transfer.transport.gloo import GlooConnector
from kvferry_engine.wire import messages as wire
from kvferry_engine.wire.assets import AssetBundle, encode_bundle

log = logging.getLogger(__name__)

RANK_SERVICE = "kvferry_engine.rank_transfer:make"
SEND_SLOTS = 4
MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """A core with its model: everything that works without a network."""

    core: EngineCore
    built: BuiltRunner
    index: PrefixIndex
    model_info: wire.ModelInfo
    assets: AssetBundle
    assets_data: bytes

    def close(self) -> None:
        """End rank processes. Idempotent."""
        self.built.close()


def build_parts(
    config: EngineConfig,
    *,
    send: Callable[[str, wire.Step], None],
    clock: Callable[[], float],
    rank_setup: bytes = b"",
    on_rank_death: Callable[[Exception], None] | None = None,
) -> EngineParts:
    """Load the model and build its core. Blocks while weights are read; raises EngineError.

    `rank_setup`, when given, starts the transfer worker in every further rank.
    """
    started_s = clock()
    source = open_source(config.model, revision=config.revision, load_format=config.load_format, seed=config.seed)
    assets = source.assets(chat_template=config.chat_template, generation_config=config.generation_config)
    with load_progress(source.num_bytes, label=source.root) as progress:
        built = build_runner(
            config,
            source,
            service=RANK_SERVICE if rank_setup else "",
            service_setup=rank_setup,
            on_rank_death=on_rank_death,
            progress=progress,
        )
    try:
        assets.max_model_len = built.max_model_len
        digest, data = encode_bundle(assets)
        info = _model_info(
            config, built, source.weights_id(), root=source.root, assets=assets, digest=digest, size=len(data)
        )
        index = PrefixIndex()
        pool = BlockPool(built.num_blocks, config.block_size, on_evict=index.remove)
        scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=built.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                policy=config.scheduling_policy,
                enable_prefix_caching=config.enable_prefix_caching,
                lookahead=built.lookahead,
            ),
            pool,
            index,
        )
        core = EngineCore(
            limits=CoreLimits(
                vocab_size=built.model.vocab_size,
                max_model_len=built.max_model_len,
                max_logprobs=config.max_logprobs,
                max_queued=config.max_num_queued_reqs,
                lookahead=built.lookahead,
            ),
            scheduler=scheduler,
            runner=built.runner,
            send=send,
            clock=clock,
        )
    except BaseException:
        built.close()
        raise
    log.info(
        "model ready root=%s dtype=%s capacity_tokens=%d max_model_len=%d seconds=%.1f",
        source.root,
        info.dtype,
        info.capacity_tokens,
        info.max_model_len,
        clock() - started_s,
    )
    return EngineParts(
        core=core,
        built=built,
        index=index,
        model_info=info,
        assets=assets,
        assets_data=data,
    )


class Engine:
    """A served engine: the parts and their connections to the world."""

    def __init__(
        self,
        *,
        parts: EngineParts,
        identity: EngineIdentity,
        network: Network,
        control: Control,
        transfer: TransferService,
        ranks: Ranks,
        health: HealthServer,
        probe: Probe,
    ) -> None:
        self.core = parts.core
        self.identity = identity
        self.network = network
        self.control = control
        self._parts = parts
        self._transfer = transfer
        self._ranks = ranks
        self._health = health
        self._probe = probe

    def start(self) -> None:
        """Begin to answer routers and peers."""
        self._probe.stats = self.core.stats
        self.core.stats.turned(self._probe.clock())
        self.network.start()

    @property
    def has_remote_ranks(self) -> bool:
        """Ranks live in other processes."""
        return self._parts.built.ranks is not None

    @property
    def is_drained(self) -> bool:
        """Nothing runs here and nobody is being sent KV."""
        return not self.core.requests() and not self._transfer.is_busy()

    @property
    def failure(self) -> str:
        """Why the engine cannot go on, empty while it can."""
        return self._probe.failure

    def take_rank_reports(self) -> None:
        """Bring what ranks in other processes reported to the transfer service."""
        group = self._parts.built.ranks
        if group is not None:
            for rank, payload in group.poll_service():
                self._ranks.deliver(rank, payload)

    def audit(self) -> None:
        """Compare the block ledger with what the parts claim; disagreements are logged and counted, blocks never moved."""
        scheduler, claims = self.core.scheduler, self._transfer.claims()
        sequences = list(scheduler.sequences.values())
        problems = audit(scheduler.pool, self._parts.index, sequences, claims)
        counters = self.core.stats.counters
        counters.audits += 1
        if problems:
            counters.leaked_blocks += max(len(leaked_blocks(scheduler.pool, sequences, claims)), 1)
            log.error("audit found problems count=%d first=%s", len(problems), problems[0])

    def close(self) -> None:
        """Say goodbye, close pairs and sockets, end rank processes."""
        with ExitStack() as stack:  # every part closes, whatever another one raises
            for close in (self._parts.close, self._health.close, self._transfer.close, self.network.close):
                stack.callback(close)


def build_engine(config: EngineConfig) -> Engine:
    """Build the engine of one process. Ports are taken before the model is loaded; raises EngineError."""
    boot = secrets.token_hex(8)
    advertised = config.advertise_host or config.host
    store, store_port = host_store(config.host, config.store_port)
    identity = EngineIdentity(
        boot=boot,
        service=config.service,
        store_address=_join(advertised, store_port),
        role=config.role,
    )
    probe = Probe(clock=time.monotonic)
    beats = _Beats(identity)
    network = Network(
        hello=identity.hello,
        beat=beats.make,
        boot=boot,
        host=config.host,
        port=config.port,
        secrets=read_secrets(config.wire_secret_file),
    )
    if advertised in ("0.0.0.0", "::"):
        raise ConfigError(f"--host {config.host} is no address that peers can dial; give --advertise-host")
    identity.address = _join(advertised, network.port)
    identity.name = f"{config.role}-{identity.address}"

    def rank_died(error: Exception) -> None:
        probe.failure = str(error)
        network.wake_core()

    registry = CollectorRegistry()
    health = HealthServer(host=config.host, port=config.http_port, probe=probe, registry=registry)
    health.start()
    worker_setup = WorkerSetup(
        host=advertised,
        num_receive_slots=config.staging_slots,
        num_send_slots=SEND_SLOTS,
        slot_bytes=config.staging_slot_bytes,
    )
    parts = build_parts(
        config,
        send=network.send,
        clock=time.monotonic,
        rank_setup=msgspec.msgpack.encode(worker_setup),
        on_rank_death=rank_died,
    )
    core, built = parts.core, parts.built
    smallest_bytes = head_layer_bytes(built.kv_layout)
    if config.staging_slot_bytes < smallest_bytes:
        parts.close()
        raise ConfigError(
            f"--staging-slot-bytes {config.staging_slot_bytes} holds less than one head of one block; "
            f"give at least {smallest_bytes}"
        )
    identity.model = parts.model_info
    beats.core = core
    stores = Stores()
    stores.add_own(identity.store_address, store)
    connectors = make_connectors(config, built, stores, host=advertised)
    worker = RankWorker(
        storage=built.storage,
        num_receive_slots=worker_setup.num_receive_slots,
        num_send_slots=worker_setup.num_send_slots,
        slot_bytes=worker_setup.slot_bytes,
        connectors=connectors,
        wake=network.wake_core,
    )
    ranks = Ranks(
        {0: worker},
        num_ranks=config.tensor_parallel_size,
        forward=built.ranks.send_service if built.ranks is not None else None,
        wake=network.wake_core,
    )
    transfer = TransferService(
        TransferContext(
            settings=TransferSettings(
                boot=boot,
                store_address=identity.store_address,
                address=identity.address,
                layout=built.kv_layout,
                tensor_parallel=config.tensor_parallel_size,
                pair_hash=parts.model_info.pair_hash,
                service=config.service,
                transports=tuple(connectors),
                num_receive_slots=worker_setup.num_receive_slots,
                num_send_slots=worker_setup.num_send_slots,
                slot_bytes=worker_setup.slot_bytes,
                vocab_size=built.model.vocab_size,
            ),
            link=network,
            scheduler=core.scheduler,
            index=parts.index,
            ranks=ranks,
            next_handle=core.next_handle,
            estimate_start_s=core.estimate_start_s,
            forget=built.runner.forget,
            counters=core.stats.counters,
        ),
        clock=time.monotonic,
    )
    core.transfer = transfer
    control = Control(
        core=core,
        network=network,
        identity=identity,
        index=parts.index,
        transfer=transfer,
        assets=parts.assets_data,
        probe=probe,
        clock=time.monotonic,
    )
    registry.register(
        EngineCollector(
            model_name=parts.model_info.names[0],
            engine=identity.name,
            snapshot=lambda: (core.load, core.stats.counters),
        )
    )
    return Engine(
        parts=parts,
        identity=identity,
        network=network,
        control=control,
        transfer=transfer,
        ranks=ranks,
        health=health,
        probe=probe,
    )


class _Beats:
    """Makes BEAT messages for the network thread; `core` is there once the model is loaded."""

    def __init__(self, identity: EngineIdentity) -> None:
        self._identity = identity
        self.core: EngineCore | None = None

    def make(self) -> wire.Beat:
        """The beat of this moment."""
        beat = wire.Beat(role=self._identity.role, draining=self._identity.is_draining)
        if self.core is not None:
            age_s = max(time.monotonic() - self.core.stats.last_turn_s, 0.0)
            beat.load = msgspec.structs.replace(self.core.load, step_age_s=age_s)
            beat.counters = self.core.stats.counters
        return beat


def make_connectors(config: EngineConfig, built: BuiltRunner, stores: Stores, *, host: str) -> dict[str, Connector]:
    """Return the ways KV can travel on rank 0, best first. Raises ConfigError when NCCL is demanded and cannot be used."""
    connectors: dict[str, Connector] = {}
    if config.transfer_transport is not TransportName.GLOO:
        obstacle = nccl.probe(built.device, config.tensor_parallel_size)
        if not obstacle:
            connectors["nccl"] = nccl.NcclConnector(stores, device=built.device)
        elif config.transfer_transport is TransportName.NCCL:
            raise ConfigError(f"--transfer-transport nccl cannot be used: {obstacle}; use auto or gloo")
    connectors["gloo"] = GlooConnector(stores, host=host)
    return connectors


def read_secrets(path: str | None) -> list[bytes]:
    """Return the wire secrets of a file, newest first; none without a file. Raises ConfigError."""
    if path is None:
        return []
    try:
        lines = [line.strip() for line in Path(path).read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--wire-secret-file {path} cannot be read: {error.strerror}") from error
    if not lines or any(len(line) < MIN_SECRET_BYTES for line in lines):
        raise ConfigError(
            f"--wire-secret-file {path} must hold one secret a line, each of at least {MIN_SECRET_BYTES} bytes"
        )
    return lines


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _model_info(
    config: EngineConfig, built: BuiltRunner, weights: str, *, root: str, assets: AssetBundle, digest: str, size: int
) -> wire.ModelInfo:
    dtype = built.kv_layout.dtype
    return wire.ModelInfo(
        names=list(config.served_model_name) or [root],
        root=root,
        max_model_len=built.max_model_len,
        vocab_size=built.model.vocab_size,
        tasks=list(assets.tasks),
        dtype=dtype,
        layout=built.kv_layout,
        num_blocks=built.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tensor_parallel=config.tensor_parallel_size,
        weights_id=weights,
        pair_hash=pair_hash(weights, built.kv_layout),
        output_hash=output_hash(weights, assets_digest=digest, dtype=dtype),
        assets_digest=digest,
        assets_bytes=size,
        max_logprobs=config.max_logprobs,
        logprobs_mode=config.logprobs_mode,
    )
