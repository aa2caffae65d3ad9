"""The memory behind the paged KV cache: how big a block is, how many fit, and the one function that allocates them.

One tensor per rank, [layers, blocks, 2 (K, V), kv heads of the rank, slots, head dim]; `block_pool` decides who owns a block.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvferry_engine.config import EngineConfig, ModelConfig
from kvferry_engine.errors import ConfigError, OutOfMemoryError

log = logging.getLogger(__name__)

BLOCK_SIZES = (16, 32, 64, 128)
CPU_DEFAULT_BYTES = 4 << 30
CPU_DEFAULT_SHARE = 0.4
"""Of the memory a process may still take; the rest is for weights read later, activations and neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLayout:
    """Shape of one rank's KV cache without the number of blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: all layers, keys and values, on this rank."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePlan:
    """How many blocks there are and the longest sequence (tokens) the engine admits with them."""

    num_blocks: int
    max_model_len: int


def make_layout(model: ModelConfig, *, num_kv_heads: int, block_size: int, dtype: torch.dtype) -> StorageLayout:
    """Return the layout of a rank that holds `num_kv_heads` heads. Raises ConfigError for an unsupported block size."""
    if block_size not in BLOCK_SIZES:
        allowed = ", ".join(map(str, BLOCK_SIZES))
        raise ConfigError(f"--block-size {block_size} is not supported; use one of {allowed}")
    return StorageLayout(
        num_layers=model.num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def allocate(layout: StorageLayout, num_blocks: int, device: torch.device) -> Tensor:
    """Return the zeroed cache of a rank; on a CPU pages become resident when they are first written.

    Raises OutOfMemoryError when the device refuses.
    """
    shape = (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    try:
        if device.type == "cpu":
            return _map_lazily(num_blocks * layout.bytes_per_block).view(layout.dtype).view(shape)
        return torch.zeros(shape, dtype=layout.dtype, device=device)
    except (torch.OutOfMemoryError, RuntimeError, OSError, OverflowError, ValueError) as error:
        size = num_blocks * layout.bytes_per_block
        raise OutOfMemoryError(
            f"{size / 2**30:.2f} GiB for {num_blocks} KV blocks cannot be allocated on {device}; lower --kv-cache-memory-bytes"
        ) from error


def _map_lazily(num_bytes: int) -> Tensor:
    """Return zeroed memory [num_bytes] uint8 that becomes resident when it is first touched, in huge pages where possible.

    torch.zeros would write all of it. A (block, head) of keys is about one small page, so with small pages attention misses
    the TLB at every step and each new block costs a page fault per head.
    """
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def requested_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the longest sequence asked for: the flag, else what the model was made for. Raises ConfigError."""
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len < 1:
        raise ConfigError(f"--max-model-len {config.max_model_len} is not positive")
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} exceeds the {model.max_position} positions the model was made for"
        )
    return config.max_model_len


def plan_storage(config: EngineConfig, model: ModelConfig, layout: StorageLayout, available_bytes: int) -> StoragePlan:
    """Decide the number of blocks of every rank.

    `available_bytes` is what one rank may use unless the settings name bytes (divided over the ranks) or blocks. Raises
    OutOfMemoryError when not even one longest sequence fits; without an explicit length that length is lowered instead.
    """
    max_model_len = requested_max_model_len(config, model)
    budget = available_bytes
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes // config.tensor_parallel_size
    num_blocks = config.num_gpu_blocks_override or max(budget, 0) // layout.bytes_per_block
    needed = -(-max_model_len // layout.block_size)
    if num_blocks >= needed:
        return StoragePlan(num_blocks=num_blocks, max_model_len=max_model_len)
    if config.max_model_len is None and num_blocks > 0:
        lowered = num_blocks * layout.block_size
        log.warning("max_model_len lowered to fit the kv cache requested=%d now=%d", max_model_len, lowered)
        return StoragePlan(num_blocks=num_blocks, max_model_len=lowered)
    needed_gib = needed * layout.bytes_per_block / 2**30
    raise OutOfMemoryError(
        f"the KV cache has {num_blocks} blocks of {layout.block_size} tokens, one sequence of max_model_len {max_model_len} "
        f"needs {needed} ({needed_gib:.2f} GiB per rank); raise --kv-cache-memory-bytes or lower --max-model-len"
    )


def cpu_kv_bytes(num_ranks: int) -> int:
    """Return the default KV memory of one rank on a CPU: a share of what the container may still take, at most 4 GiB in all."""
    return min(CPU_DEFAULT_BYTES, int(available_memory_bytes() * CPU_DEFAULT_SHARE)) // num_ranks


def cuda_kv_bytes(device: torch.device, *, utilization: float, peak_activation_bytes: int) -> int:
    """Return the KV memory a GPU has left: `utilization` of all of it, less what is in use now and an activation peak."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free) - peak_activation_bytes


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return how much more memory this process may take: what the machine has free, bounded by its cgroup (v2 or v1)."""
    amounts = [_machine_available(root)]
    for folder, limit_name, usage_name in _memory_cgroups(root):
        limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
        if limit is not None and usage is not None:
            amounts.append(max(limit - usage + _reclaimable(folder / "memory.stat"), 0))
    return min(amounts)


def _machine_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return CPU_DEFAULT_BYTES


def _memory_cgroups(root: Path) -> list[tuple[Path, str, str]]:
    """Folder, limit file and usage file of this process's memory cgroups, the mount root (what a container sees) included."""
    groups: list[tuple[Path, str, str]] = []
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        for folder in sorted({path.lstrip("/"), ""}):
            if controllers == "":
                groups.append((root / "sys/fs/cgroup" / folder, "memory.max", "memory.current"))
            elif "memory" in controllers.split(","):
                groups.append(
                    (root / "sys/fs/cgroup/memory" / folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
                )
    return groups


def _reclaimable(stat: Path) -> int:
    """File cache that counts as usage but goes away under pressure, such as the pages of a checkpoint just read."""
    try:
        values = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
