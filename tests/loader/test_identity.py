"""Digests change with everything that matters, and with nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvferry_engine.loader import identity
from kvferry_engine.loader.source import open_source
from kvferry_engine.wire.messages import KVLayout
from loader.tiny_checkpoints import TINY, tiny_tensors, write_gguf

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=32, dtype="bfloat16")


def test_a_copy_elsewhere_has_the_same_id(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = model_folder(num_shards=2)
    shutil.copytree(folder, tmp_path / "copy")

    assert open_source(str(folder)).weights_id() == open_source(str(tmp_path / "copy")).weights_id()


def test_changed_values_config_and_names_change_the_id(model_folder: Callable[..., Path]) -> None:
    folder = model_folder()
    original = open_source(str(folder)).weights_id()
    weights = folder / "model.safetensors"
    data = weights.read_bytes()

    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert open_source(str(folder)).weights_id() != original

    weights.write_bytes(data)
    assert open_source(str(folder)).weights_id() == original

    weights.rename(folder / "other.safetensors")
    assert open_source(str(folder)).weights_id() != original

    (folder / "other.safetensors").rename(weights)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("1e-05", "1e-06"))
    assert open_source(str(folder)).weights_id() != original


def test_large_files_are_sampled_at_strides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 5)
    monkeypatch.setattr(identity, "SAMPLE_STRIDE_BYTES", 30)
    path = tmp_path / "shard"
    data = bytearray(100)

    def id_with(position: int | None) -> str:
        changed = bytearray(data)
        if position is not None:
            changed[position] = 1
        path.write_bytes(changed)
        return identity.weights_id({}, [identity.Shard(path=path, header_bytes=20)])

    seen = [position for position in range(100) if id_with(position) != id_with(None)]

    samples = {start + i for start in range(20, 100, 30) for i in range(5)}
    assert set(seen) == set(range(20)) | samples | set(range(95, 100))


def test_gguf_ids_depend_on_the_weights(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY)
    first = open_source(str(write_gguf(tmp_path / "m.gguf", TINY, tensors))).weights_id()
    tensors["model.norm.weight"][0] += 1

    assert open_source(str(write_gguf(tmp_path / "m.gguf", TINY, tensors))).weights_id() != first


def test_a_pair_hash_covers_weights_layout_and_quantisation() -> None:
    base = identity.pair_hash("w", LAYOUT)
    others = [
        identity.pair_hash("v", LAYOUT),
        identity.pair_hash("w", LAYOUT, kv_quantisation="fp8"),
        identity.pair_hash("w", msgspec.structs.replace(LAYOUT, block_size=16)),
        identity.pair_hash("w", msgspec.structs.replace(LAYOUT, dtype="float32")),
    ]

    assert identity.pair_hash("w", msgspec.structs.replace(LAYOUT)) == base
    assert len({base, *others}) == 5


def test_an_output_hash_covers_weights_assets_dtype_and_adapters() -> None:
    base = identity.output_hash("w", assets_digest="a", dtype="bfloat16")
    others = [
        identity.output_hash("v", assets_digest="a", dtype="bfloat16"),
        identity.output_hash("w", assets_digest="b", dtype="bfloat16"),
        identity.output_hash("w", assets_digest="a", dtype="float32"),
        identity.output_hash("w", assets_digest="a", dtype="bfloat16", adapters=["x", "y"]),
    ]

    assert len({base, *others}) == 5
    assert others[-1] == identity.output_hash("w", assets_digest="a", dtype="bfloat16", adapters=["y", "x"])
