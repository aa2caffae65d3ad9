"""Puts rank 0 together from the settings: other ranks, model, KV cache, sampler, runner; one value holds what `core` needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry_engine.config import EngineConfig, ModelConfig
from kvferry_engine.kv_cache.storage import StorageLayout, plan_storage
from kvferry_engine.layers.parallel import TensorParallel, check_split
from kvferry_engine.loader.progress import Progress
from kvferry_engine.loader.source import ModelSource
from kvferry_engine.runner.collectives import join_group
from kvferry_engine.runner.model_runner import ModelRunner
from kvferry_engine.runner.ranks import RankDiedError, RankGroup
from kvferry_engine.runner.setup import load_source, rank_device
from kvferry_engine.runner.threads import apply_threads, threads_per_rank
from kvferry_engine.sampling.sampler import Sampler
from kvferry_engine.wire.messages import KVLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRunner:
    """A runner ready for plans, and what the rest of the engine must know about it.

    `storage` is rank 0's KV cache, `layout` its shape; `kv_layout` that of all ranks together. `lookahead` is what the
    scheduler should use on this device.
    """

    runner: ModelRunner
    ranks: RankGroup | None
    storage: Tensor
    layout: StorageLayout
    kv_layout: KVLayout
    num_blocks: int
    max_model_len: int
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    lookahead: int

    def close(self) -> None:
        """Stop the other ranks. Idempotent."""
        self.runner.close()


def build_runner(
    config: EngineConfig,
    source: ModelSource,
    *,
    service: str = "",
    service_setup: bytes = b"",
    on_rank_death: Callable[[RankDiedError], None] | None = None,
    progress: Progress | None = None,
) -> BuiltRunner:
    """Load the model of an opened source over all ranks and allocate its KV cache. Takes as long as reading the weights.

    service, service_setup and on_rank_death as in `RankGroup`. Raises ConfigError, WeightsInvalidError,
    UnsupportedModelError, InvalidTensorParallelError, OutOfMemoryError, RankDiedError; other ranks are stopped then.
    """
    size, model = config.tensor_parallel_size, source.config
    check_split(
        TensorParallel(size=size),
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        intermediate_size=model.intermediate_size,
    )
    device = rank_device(config.device, 0)
    apply_threads(threads_per_rank(config.threads, size))
    ranks = None
    if size > 1:
        ranks = RankGroup(config, service=service, service_setup=service_setup, on_death=on_rank_death)
    try:
        return _build(config, source, device=device, ranks=ranks, progress=progress)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _build(
    config: EngineConfig,
    source: ModelSource,
    *,
    device: torch.device,
    ranks: RankGroup | None,
    progress: Progress | None,
) -> BuiltRunner:
    parallel = TensorParallel()
    if ranks is not None:
        parallel = join_group(store_path=ranks.store_path, rank=0, size=ranks.size, device=device)
    loaded = load_source(config, source, parallel=parallel, device=device, progress=progress)
    available_bytes = loaded.available_bytes
    if ranks is not None:
        available_bytes = min(available_bytes, ranks.wait_loaded())
    plan = plan_storage(config, source.config, loaded.layout, available_bytes)
    if ranks is not None:
        ranks.allocate(num_blocks=plan.num_blocks, max_model_len=plan.max_model_len)
    loaded.allocate(num_blocks=plan.num_blocks, max_model_len=plan.max_model_len)
    if ranks is not None:
        ranks.wait_ready()
    dtype, size_bytes = loaded.layout.dtype, plan.num_blocks * loaded.layout.bytes_per_block
    log.info(
        "kv cache allocated blocks=%d tokens=%d bytes=%d",
        plan.num_blocks,
        plan.num_blocks * config.block_size,
        size_bytes,
    )
    runner = ModelRunner(
        executor=loaded.executor,
        sampler=Sampler(source.config.vocab_size, config.logprobs_mode, device),
        logprobs_mode=config.logprobs_mode,
        block_size=config.block_size,
        ranks=ranks,
    )
    return BuiltRunner(
        runner=runner,
        ranks=ranks,
        storage=loaded.executor.storage,
        layout=loaded.layout,
        kv_layout=KVLayout(
            num_layers=source.config.num_layers,
            num_kv_heads=source.config.num_kv_heads,
            head_dim=source.config.head_dim,
            block_size=config.block_size,
            dtype=str(dtype).removeprefix("torch."),
        ),
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        model=source.config,
        device=device,
        dtype=dtype,
        lookahead=1 if device.type == "cuda" else 0,
    )
