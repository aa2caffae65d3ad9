"""Fetches a model folder from the Hugging Face hub, when `huggingface_hub` is installed and the hub can be reached.

The hub is one source among others: engines in clusters usually load from a volume, so the package is no dependency.
"""

from __future__ import annotations

from pathlib import Path

from kvferry_engine.errors import WeightsNotFoundError

PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
WHAT_ELSE = (
    "download it elsewhere and pass the folder, a .gguf file or pkg:NAME; "
    "for private models set HF_TOKEN, for a mirror HF_ENDPOINT"
)


def download(repo: str, revision: str | None) -> Path:
    """Return the local folder of a hub model, downloading what is not cached. Blocks on the network.

    Raises WeightsNotFoundError when the package is missing, the hub cannot be reached, or it has no such model.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise WeightsNotFoundError(
            f"{repo} is no path here, and the hub needs the package huggingface_hub (pip install huggingface_hub); "
            f"or {WHAT_ELSE}"
        ) from error
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=PATTERNS))
    except HFValidationError as error:
        raise WeightsNotFoundError(f"{repo!r} is neither a path here nor a hub id: {error}") from error
    except HfHubHTTPError as error:
        raise WeightsNotFoundError(
            f"the hub refuses {repo} (revision {revision or 'main'}): {_line(error)}; {WHAT_ELSE}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise WeightsNotFoundError(
            f"{repo} is no path here and not in the hub's cache, and the hub cannot be reached ({_line(error)}); "
            f"{WHAT_ELSE}"
        ) from error


def _line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
