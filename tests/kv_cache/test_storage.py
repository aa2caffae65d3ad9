"""How many KV blocks there are: from bytes, from an override, and what happens when a sequence does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry_engine.config import EngineConfig, ModelConfig
from kvferry_engine.errors import ConfigError, OutOfMemoryError
from kvferry_engine.kv_cache.storage import (
    StorageLayout,
    StoragePlan,
    allocate,
    available_memory_bytes,
    make_layout,
    plan_storage,
    requested_max_model_len,
)

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=1024,
    rms_norm_eps=1e-5,
    rope={},
    tie_word_embeddings=True,
)
LAYOUT = make_layout(MODEL, num_kv_heads=2, block_size=32, dtype=torch.bfloat16)
GIB = 1 << 30


def config(**values: Any) -> EngineConfig:
    return EngineConfig(model="m", **values)


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    storage = allocate(LAYOUT, 5, torch.device("cpu"))

    assert storage.shape == (3, 5, 2, 2, 32, 16)
    assert storage.nbytes == 5 * LAYOUT.bytes_per_block
    assert not storage.any()


def test_available_memory_becomes_blocks() -> None:
    plan = plan_storage(config(), MODEL, LAYOUT, 100 * LAYOUT.bytes_per_block + 1)

    assert plan == StoragePlan(num_blocks=100, max_model_len=1024)


def test_named_bytes_are_divided_over_the_ranks() -> None:
    settings = config(kv_cache_memory_bytes=100 * LAYOUT.bytes_per_block, tensor_parallel_size=2)

    assert plan_storage(settings, MODEL, LAYOUT, GIB).num_blocks == 50


def test_the_override_wins() -> None:
    settings = config(num_gpu_blocks_override=40, kv_cache_memory_bytes=1)

    assert plan_storage(settings, MODEL, LAYOUT, 0).num_blocks == 40


def test_an_explicit_length_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(OutOfMemoryError, match=r"one sequence of max_model_len 1000 needs 32 .*--max-model-len"):
        plan_storage(config(max_model_len=1000), MODEL, LAYOUT, 31 * LAYOUT.bytes_per_block)


def test_the_models_own_length_is_lowered_to_what_fits() -> None:
    plan = plan_storage(config(), MODEL, LAYOUT, 31 * LAYOUT.bytes_per_block)

    assert plan == StoragePlan(num_blocks=31, max_model_len=31 * 32)


def test_not_even_one_block_is_an_error() -> None:
    with pytest.raises(OutOfMemoryError):
        plan_storage(config(), MODEL, LAYOUT, LAYOUT.bytes_per_block - 1)


def test_a_length_beyond_the_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="1024 positions"):
        requested_max_model_len(config(max_model_len=1025), MODEL)


def test_an_odd_block_size_is_an_error() -> None:
    with pytest.raises(ConfigError, match="16, 32, 64, 128"):
        make_layout(MODEL, num_kv_heads=2, block_size=24, dtype=torch.float32)


def test_an_impossible_allocation_is_our_error() -> None:
    huge = StorageLayout(num_layers=1000, num_kv_heads=1000, head_dim=1000, block_size=128, dtype=torch.float32)
    with pytest.raises(OutOfMemoryError, match="cannot be allocated on cpu"):
        allocate(huge, 1 << 40, torch.device("cpu"))


def write_machine(root: Path, cgroup: str, files: dict[str, str]) -> None:
    for name, text in {"proc/meminfo": "MemAvailable: 8388608 kB\n", "proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_version_2_limit_bounds_the_memory(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/"
    stat = f"anon 5\ninactive_file {GIB}\n"
    write_machine(
        tmp_path,
        "0::/pod\n",
        {group + "memory.max": f"{4 * GIB}\n", group + "memory.current": f"{2 * GIB}\n", group + "memory.stat": stat},
    )
    assert available_memory_bytes(tmp_path) == 3 * GIB


def test_a_version_1_limit_bounds_the_memory(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/"
    write_machine(
        tmp_path,
        "4:memory:/pod\n",
        {group + "memory.limit_in_bytes": f"{4 * GIB}\n", group + "memory.usage_in_bytes": f"{GIB}\n"},
    )
    assert available_memory_bytes(tmp_path) == 3 * GIB


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    write_machine(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "max\n"})
    assert available_memory_bytes(tmp_path) == 8 * GIB
