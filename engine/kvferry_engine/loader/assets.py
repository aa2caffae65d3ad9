"""Collects what a router needs of a Hugging Face model folder into one bundle: tokenizer, templates, generation defaults.

Templates come from every place transformers reads them from; a template file beside the tokenizer wins over one inside
tokenizer_config.json. `gguf_tokenizer` makes the same bundle from GGUF metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ConfigError, WeightsInvalidError, WeightsNotFoundError
from kvferry_engine.loader.hf_config import token_ids
from kvferry_engine.wire.assets import AssetBundle

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
NO_GENERATION_CONFIG = "vllm"


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, {} when the file does not exist. Raises WeightsInvalidError when it is damaged."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise WeightsInvalidError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsInvalidError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def read_generation_config(choice: str, beside: Path | None) -> dict[str, Any]:
    """Return generation defaults: `auto` reads `beside` the model, `vllm` none, anything else is a folder or file.

    Raises ConfigError when a named path has no generation config.
    """
    if choice == NO_GENERATION_CONFIG or (choice == "auto" and beside is None):
        return {}
    if choice == "auto" and beside is not None:
        return read_json(beside / "generation_config.json")
    path = Path(choice)
    file = path / "generation_config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"--generation-config {choice}: there is no {file}; "
            "use auto, vllm (none), or a folder that has generation_config.json"
        )
    return read_json(file)


def folder_assets(
    folder: Path, config: ModelConfig, generation: dict[str, Any], chat_template: str | None
) -> AssetBundle:
    """Return the bundle of a model folder. Raises WeightsNotFoundError without tokenizer.json."""
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise WeightsNotFoundError(
            f"{folder} has no tokenizer.json, which is needed; make one with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    tokenizer_json = tokenizer_path.read_bytes()
    tokenizer = parse_tokenizer(tokenizer_json, tokenizer_path)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    special = _special_tokens(read_json(folder / "special_tokens_map.json"), tokenizer_config)
    eos_text = special.get("eos_token")
    eos_id = None if eos_text is None else tokenizer.token_to_id(eos_text)
    ids = token_ids(eos_id, config.hf.get("eos_token_id"), generation.get("eos_token_id"))
    if ids and "eos_token" not in special:
        special["eos_token"] = tokenizer.id_to_token(ids[0]) or ""
    return AssetBundle(
        tokenizer_json=tokenizer_json,
        chat_templates=choose_chat_template(folder_templates(folder, tokenizer_config), chat_template),
        special_tokens=special,
        eos_token_id=ids[0] if ids else None,
        extra_eos_token_ids=list(ids[1:]),
        add_bos_token=_adds_bos(tokenizer, special.get("bos_token"), tokenizer_config),
        generation_config=generation,
        config=config.hf,
        tasks=list(config.tasks),
        max_model_len=config.max_position,
    )


def parse_tokenizer(data: bytes, origin: Path) -> Tokenizer:
    """Return the tokenizer of a JSON file. Raises WeightsInvalidError naming `origin` when it is damaged."""
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises plain Exception for damaged input
        raise WeightsInvalidError(f"{origin} does not hold a usable tokenizer: {error}") from error


def folder_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder by name."""
    templates: dict[str, str] = {}
    given = tokenizer_config.get("chat_template")
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        templates |= {str(entry["name"]): str(entry["template"]) for entry in given}
    processor = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(processor, str):
        templates["default"] = processor
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates


def choose_chat_template(templates: dict[str, str], choice: str | None) -> dict[str, str]:
    """Apply --chat-template: the name of a template of the model, a file, or a literal template.

    Raises ConfigError for something that is none of them.
    """
    if choice is None:
        return templates
    if choice in templates:
        return {"default": templates[choice]}
    if any(mark in choice for mark in ("{{", "{%", "\n")):
        return {"default": choice}
    path = Path(choice)
    if not path.is_file():
        known = ", ".join(templates) or "none"
        raise ConfigError(
            f"--chat-template {choice}: no such file, and no template of the model (it has: {known}); "
            "give a file, one of those names, or a literal Jinja template"
        )
    return {"default": path.read_text(encoding="utf-8")}


def _special_tokens(token_map: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    special: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        value = tokenizer_config.get(name) or token_map.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special


def _adds_bos(tokenizer: Tokenizer, bos: str | None, tokenizer_config: Mapping[str, Any]) -> bool:
    """Return whether prompts start with BOS: what the tokenizer file does, or what the config asks for on top."""
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    ids: list[int] = tokenizer.encode("", add_special_tokens=True).ids
    return bos_id is not None and (bos_id in ids or bool(tokenizer_config.get("add_bos_token", False)))
