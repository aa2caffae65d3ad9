"""Engine settings as Python programs write them: keywords of `LLM` and `AsyncLLM` into an `EngineConfig`.

A command line turns its text into enums while parsing (`flags`); here a program may give either.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from kvferry_engine.config import EngineConfig
from kvferry_engine.config_checks import check_config

DEFAULTS: dict[str, Any] = {"max_num_queued_reqs": sys.maxsize}
"""Where a program differs from a server: its batch may be as long as it likes, nobody is answered busy."""


def engine_config(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """Return the config; texts become enums.

    Raises ValueError for unknown settings and choices, ConfigError for numbers out of range.
    """
    hints = typing.get_type_hints(EngineConfig)
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    values = dict(DEFAULTS)
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"there is no setting {name}; " + (f"did you mean {near[0]}?" if near else "see EngineConfig")
            )
        values[name] = _converted(name, value, hints[name])
    config = EngineConfig(model=str(model), **values)
    check_config(config)
    return config


def _converted(name: str, value: Any, hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        try:
            return hint(value)
        except ValueError:
            raise ValueError(f"{name} is {value!r}, allowed are {', '.join(hint)}") from None
    if name == "served_model_name":
        return (value,) if isinstance(value, str) else tuple(value)
    return value
