"""The way into this package: from what a person wrote after `kvferry engine` to config, assets and weights of a model.

A source knows its config and assets before a single weight is read, so an engine can refuse, plan memory and answer ASSETS
early. Formats live in `folder`, `gguf_source` and `dummy`; places in `packages` and `hub`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from torch import Tensor

from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ConfigError, WeightsNotFoundError
from kvferry_engine.loader.dummy import DummySource
from kvferry_engine.loader.folder import FolderSource
from kvferry_engine.loader.gguf_source import GgufSource
from kvferry_engine.loader.hub import download
from kvferry_engine.loader.packages import find_package_model
from kvferry_engine.loader.progress import Progress
from kvferry_engine.wire.assets import AssetBundle

PACKAGE_PREFIX = "pkg:"
GGUF_SUFFIX = ".gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class LoadFormat(StrEnum):
    AUTO = "auto"
    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    DUMMY = "dummy"


class ModelSource(Protocol):
    """A model before it is loaded. `root` is the name a person gave; `num_bytes` what `weights` reports as progress."""

    root: str
    config: ModelConfig

    @property
    def num_bytes(self) -> int: ...

    def assets(self, *, chat_template: str | None = None, generation_config: str = "auto") -> AssetBundle:
        """Return what routers need; arguments as `EngineConfig` has them. max_model_len is the model's own limit.

        Raises WeightsNotFoundError without a tokenizer, WeightsInvalidError for a damaged one, ConfigError for wrong arguments.
        """
        ...

    def weights(self, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, CPU tensor) once each, in file order.

        Tensors may be views of mapped files: copy, never write. Raises WeightsInvalidError and UnsupportedModelError,
        also half way.
        """
        ...

    def weights_id(self) -> str:
        """Return the digest of the weights (`identity.weights_id`); reads samples of the files."""
        ...


def open_source(model: str, *, revision: str | None = None, load_format: str = "auto", seed: int = 0) -> ModelSource:
    """Find a model and read everything but its weights.

    `model` is a folder, a .gguf file, pkg:NAME or a hub id `org/name` (of `revision`); `seed` is for load_format dummy.
    Raises ConfigError, WeightsNotFoundError, WeightsInvalidError and UnsupportedModelError.
    """
    try:
        form = LoadFormat(load_format)
    except ValueError as error:
        raise ConfigError(f"--load-format {load_format}: allowed are {', '.join(LoadFormat)}") from error
    path = _locate(model, revision)
    is_gguf = path.suffix == GGUF_SUFFIX
    if form in (LoadFormat.SAFETENSORS, LoadFormat.GGUF) and is_gguf != (form is LoadFormat.GGUF):
        found = "a GGUF file" if is_gguf else "a folder with config.json"
        raise ConfigError(f"--load-format {form}: {path} is {found}; use --load-format auto")
    if is_gguf:
        source: ModelSource = GgufSource(path, root=model)
    else:
        source = FolderSource(path, root=model, needs_weights=form is not LoadFormat.DUMMY)
    return DummySource(source, seed) if form is LoadFormat.DUMMY else source


def _locate(model: str, revision: str | None) -> Path:
    """Return the .gguf file or the folder with config.json that `model` names."""
    if model.startswith(PACKAGE_PREFIX):
        return find_package_model(model.removeprefix(PACKAGE_PREFIX))
    path = Path(model).expanduser()
    if path.is_dir():
        return _inside(path)
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise ConfigError(
                f"{model} is a file, but no .gguf file; for safetensors give the folder that has config.json"
            )
        return path
    if path.suffix == GGUF_SUFFIX or not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise WeightsNotFoundError(
            f"there is no {path.absolute()}; give a folder with config.json and *.safetensors, a .gguf file, "
            "pkg:NAME of an installed model package, or a hub id org/name"
        )
    return _inside(download(model, revision))


def _inside(folder: Path) -> Path:
    """Return the folder, or the one GGUF model in a folder that has no config.json."""
    if (folder / "config.json").is_file():
        return folder
    found = sorted(
        path for path in folder.glob(f"*{GGUF_SUFFIX}") if not re.search(r"-(?!00001)\d{5}-of-\d{5}", path.name)
    )
    if not found:
        raise WeightsNotFoundError(f"{folder} has neither config.json nor a .gguf file")
    if len(found) > 1:
        raise ConfigError(f"{folder} has several models, name one of them: {', '.join(path.name for path in found)}")
    return found[0]
