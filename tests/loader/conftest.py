"""Tiny model folders for the loader's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from loader.tiny_checkpoints import TINY, tiny_tensors, tiny_tokenizer


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a tiny model folder, in `num_shards` files; further arguments change the config."""

    def make(*, num_shards: int = 1, **changes: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        config = {**TINY, **changes}
        (folder / "config.json").write_text(json.dumps(config))
        tiny_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"})
        )
        tensors = tiny_tensors(config)
        if num_shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
        weight_map = {tensor: names[i % num_shards] for i, tensor in enumerate(tensors)}
        for name in names:
            save_file({k: v for k, v in tensors.items() if weight_map[k] == name}, folder / name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return make
