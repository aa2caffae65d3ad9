"""Model folders: one file, shards, and every way in which they can be incomplete or damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry_engine.errors import ConfigError, WeightsInvalidError, WeightsNotFoundError
from kvferry_engine.loader.source import open_source

Folder = Callable[..., Path]


def test_a_single_file_gives_all_its_tensors(model_folder: Folder) -> None:
    folder = model_folder()

    source = open_source(str(folder))
    weights = dict(source.weights())

    expected = load_file(folder / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert source.root == str(folder)
    assert source.config.num_layers == 2


def test_shards_give_the_same_tensors_as_one_file(model_folder: Folder, tmp_path: Path) -> None:
    sharded = model_folder(num_shards=3)
    expected = {k: v for path in sharded.glob("*.safetensors") for k, v in load_file(path).items()}

    weights = dict(open_source(str(sharded)).weights())

    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_progress_adds_up_to_the_announced_bytes(model_folder: Folder) -> None:
    source = open_source(str(model_folder(num_shards=2)))
    seen: list[int] = []

    for _ in source.weights(seen.append):
        pass

    assert sum(seen) == source.num_bytes > 0


def test_the_checkpoints_dtype_counts_when_the_config_is_silent(model_folder: Folder) -> None:
    folder = model_folder(torch_dtype=None)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")

    assert open_source(str(folder)).config.dtype == "bfloat16"


def test_assets_carry_tokenizer_templates_and_ids(model_folder: Folder) -> None:
    folder = model_folder()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.5}))

    assets = open_source(str(folder)).assets()

    assert assets.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert assets.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (assets.eos_token_id, assets.extra_eos_token_ids) == (2, [5])
    assert assets.chat_templates == {"default": "{{ messages }}"}
    assert assets.generation_config["temperature"] == 0.5
    assert assets.config["hidden_size"] == 32
    assert not assets.add_bos_token


def test_the_generation_config_can_be_switched_off_or_come_from_elsewhere(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder()
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text(json.dumps({"temperature": 0.9}))
    source = open_source(str(folder))

    assert source.assets(generation_config="vllm").generation_config == {}
    assert source.assets(generation_config=str(tmp_path / "other")).generation_config == {"temperature": 0.9}
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        source.assets(generation_config=str(tmp_path / "nowhere"))


def test_templates_come_from_every_place_and_files_win(model_folder: Folder) -> None:
    folder = model_folder()
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]})
    )
    source = open_source(str(folder))
    assert source.assets().chat_templates == {"default": "a", "tool_use": "b"}

    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "c"}))
    assert source.assets().chat_templates == {"default": "c", "tool_use": "b"}

    (folder / "chat_template.jinja").write_text("d")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("e")
    assert source.assets().chat_templates == {"default": "d", "tool_use": "b", "rag": "e"}


def test_a_chat_template_may_be_a_name_a_file_or_a_literal(model_folder: Folder, tmp_path: Path) -> None:
    source = open_source(str(model_folder()))
    (tmp_path / "mine.jinja").write_text("mine")

    assert source.assets(chat_template="default").chat_templates == {"default": "{{ messages }}"}
    assert source.assets(chat_template="{{ x }}").chat_templates == {"default": "{{ x }}"}
    assert source.assets(chat_template=str(tmp_path / "mine.jinja")).chat_templates == {"default": "mine"}
    with pytest.raises(ConfigError, match="no such file"):
        source.assets(chat_template="nothing.jinja")


def test_missing_files_are_named(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder(num_shards=2)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(WeightsNotFoundError, match=r"tokenizer\.json"):
        open_source(str(folder)).assets()

    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        open_source(str(folder))

    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsNotFoundError, match="convert them to safetensors"):
        open_source(str(folder))

    (folder / "config.json").unlink()
    with pytest.raises(WeightsNotFoundError, match=r"config\.json"):
        open_source(str(folder))


def test_an_index_that_promises_too_much_is_found_at_once(model_folder: Folder) -> None:
    folder = model_folder(num_shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))

    with pytest.raises(WeightsInvalidError, match=r"model\.layers\.9"):
        open_source(str(folder))


@pytest.mark.parametrize("keep", [0, 3, 8, 40, 3000, -1])
def test_a_truncated_file_is_found_before_loading(model_folder: Folder, keep: int) -> None:
    path = model_folder() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(WeightsInvalidError, match="download it again"):
        open_source(str(path.parent))


def test_damaged_json_is_a_clear_error(model_folder: Folder) -> None:
    folder = model_folder()
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:8] + b"#" + data[9:])
    with pytest.raises(WeightsInvalidError, match="header cannot be read"):
        open_source(str(folder))

    weights.write_bytes(data)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsInvalidError, match="usable tokenizer"):
        open_source(str(folder)).assets()

    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsInvalidError, match="not valid JSON"):
        open_source(str(folder))


def test_sizes_and_shapes_that_disagree_are_found(model_folder: Folder) -> None:
    path = model_folder() / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape":[64,32]', b'"shape":[64,31]'))

    with pytest.raises(WeightsInvalidError, match="disagree"):
        open_source(str(path.parent))
