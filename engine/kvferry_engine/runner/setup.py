"""Brings one rank up: device, type, model, weights, KV cache, graphs. The same steps for rank 0 and for every other rank.

`build` puts rank 0 together with the scheduler's side of the runner; `rank` is the main of the others.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry_engine.attention.backend import choose_backend
from kvferry_engine.config import Device, DType, EngineConfig, ModelConfig
from kvferry_engine.errors import ConfigError
from kvferry_engine.kv_cache.storage import (
    StorageLayout,
    allocate,
    cpu_kv_bytes,
    cuda_kv_bytes,
    make_layout,
    requested_max_model_len,
)
from kvferry_engine.layers.context import LayerContext
from kvferry_engine.layers.parallel import TensorParallel
from kvferry_engine.loader.progress import Progress
from kvferry_engine.loader.source import ModelSource, open_source
from kvferry_engine.models.causal_lm import CausalLM
from kvferry_engine.models.registry import create_model
from kvferry_engine.runner.batch import ForwardBatch
from kvferry_engine.runner.cuda_graphs import DecodeGraphs
from kvferry_engine.runner.executor import ModelExecutor
from kvferry_engine.runner.profile import peak_activation_bytes

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(slots=True, kw_only=True)
class RankModel:
    """A rank with weights; `executor` exists once `allocate` was called."""

    config: EngineConfig
    model: CausalLM
    layout: StorageLayout
    available_bytes: int
    """Memory left for KV on this rank."""
    _executor: ModelExecutor | None = None
    _previous_ids: Tensor | None = None

    @property
    def executor(self) -> ModelExecutor:
        """What runs batches. `allocate` must have been called."""
        assert self._executor is not None
        return self._executor

    def allocate(self, *, num_blocks: int, max_model_len: int) -> None:
        """Make the KV cache and, on a GPU unless told not to, record graphs. Raises OutOfMemoryError."""
        device = self.model.context.device
        storage = allocate(self.layout, num_blocks, device)
        graphs = None
        if device.type == "cuda" and not self.config.enforce_eager:
            graphs = DecodeGraphs(
                self.model,
                storage,
                max_num_seqs=self.config.max_num_seqs,
                max_blocks_per_row=-(-max_model_len // self.layout.block_size),
            )
        self._executor = ModelExecutor(self.model, storage, graphs=graphs)

    def follow(self, batch: ForwardBatch) -> None:
        """Take part in a step that rank 0 runs, collective by collective as `ModelRunner` does."""
        hidden, tensors = self.executor.forward(batch, self._previous_ids)
        for _ in self.executor.prompt_logits(hidden, tensors):
            pass
        if len(tensors.sample_indices):
            self.executor.sample_logits(hidden, tensors)
            self._previous_ids = self.executor.share_ids(torch.empty_like(tensors.sample_indices))


def rank_device(device: Device, rank: int) -> torch.device:
    """Return the device of a rank. Raises ConfigError when CUDA is asked for and absent, or has too few devices."""
    if device is Device.CPU or (device is Device.AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: no CUDA device is visible; use --device cpu or check the driver and the container"
        )
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {rank} needs a GPU of its own, {torch.cuda.device_count()} are visible; lower --tensor-parallel-size"
        )
    return torch.device("cuda", rank)


def model_dtype(requested: DType, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the type of weights, activations and KV cache. Raises ConfigError for one that cannot be used."""
    if requested is not DType.AUTO:
        return _DTYPES[requested.value]
    if model.dtype not in _DTYPES:
        raise ConfigError(
            f"the checkpoint's type {model.dtype} is not one to compute in; choose --dtype bfloat16, float16 or float32"
        )
    if model.dtype == "float32" and device.type == "cuda":
        return torch.bfloat16
    return _DTYPES[model.dtype]


def open_configured(config: EngineConfig) -> ModelSource:
    """Open the model that the settings name; reads everything but weights. Raises the loader's errors."""
    return open_source(config.model, revision=config.revision, load_format=config.load_format, seed=config.seed)


def load_source(
    config: EngineConfig,
    source: ModelSource,
    *,
    parallel: TensorParallel,
    device: torch.device,
    progress: Progress | None = None,
) -> RankModel:
    """Build the model of an opened source on this rank and fill it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = model_dtype(config.dtype, source.config, device)
    context = LayerContext(
        dtype=dtype,
        device=device,
        backend=choose_backend(config.attention_backend, device),
        max_model_len=requested_max_model_len(config, source.config),
        parallel=parallel,
    )
    started_s = time.monotonic()
    model = create_model(source.config, context)
    model.load_weights(source.weights(progress))
    log.info(
        "weights loaded architecture=%s dtype=%s seconds=%.1f",
        source.config.architecture,
        dtype,
        time.monotonic() - started_s,
    )
    num_kv_heads = parallel.split_kv_heads(source.config.num_kv_heads)[1]
    layout = make_layout(source.config, num_kv_heads=num_kv_heads, block_size=config.block_size, dtype=dtype)
    return RankModel(config=config, model=model, layout=layout, available_bytes=_available_bytes(config, model, layout))


def _available_bytes(config: EngineConfig, model: CausalLM, layout: StorageLayout) -> int:
    device = model.context.device
    if device.type == "cpu":
        return cpu_kv_bytes(config.tensor_parallel_size)
    peak = peak_activation_bytes(
        model, layout, max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs
    )
    return cuda_kv_bytes(device, utilization=config.gpu_memory_utilization, peak_activation_bytes=peak)
