"""Every error an engine raises on purpose, in one tree; `main` turns them into one line and an exit code.

`reason` is a CamelCase constant that also reaches the pod's termination log and the operator's conditions.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors with a cause a person can act on."""

    reason = "EngineError"


class ConfigError(EngineError):
    """A flag or manifest value is wrong; the message says what was given, what is allowed and what to do."""

    reason = "InvalidConfig"


class WeightsNotFoundError(EngineError):
    reason = "WeightsNotFound"


class WeightsInvalidError(EngineError):
    """Files are there but cannot be used: corrupt, truncated, missing or unexpected tensors."""

    reason = "WeightsInvalid"


class UnsupportedModelError(EngineError):
    reason = "UnsupportedModel"


class InvalidTensorParallelError(EngineError):
    reason = "InvalidTensorParallel"


class OutOfMemoryError(EngineError):
    """The KV cache does not fit, or not even one request of max_model_len fits into it."""

    reason = "InsufficientMemory"


class PortInUseError(EngineError):
    reason = "PortInUse"


class RequestError(EngineError):
    """One request cannot run; it fails, the engine goes on. `param` names the field for the client."""

    reason = "InvalidRequest"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
