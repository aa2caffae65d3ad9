"""Command-line flags from settings dataclasses, so that a setting is declared once and its flag cannot drift.

A settings class is a frozen dataclass whose fields carry metadata: `help` (one sentence), `flag` (None: derived from the
name, "": positional), `alias` (further spellings), `unit`. Only what a person typed reaches the class, whose own defaults
fill the rest; hence a configuration file can stand between the two (`parse_with_config`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar


class SettingsClass(Protocol):
    """A dataclass type made of settings."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


S = TypeVar("S", bound=SettingsClass)

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FACTORS |= {letter.upper(): 1 << (10 * power) for power, letter in enumerate("kmgt", start=1)}
_FACTORS |= {f"{letter.upper()}i": 1 << (10 * power) for power, letter in enumerate("kmgt", start=1)}
_NUMBER = re.compile(r"(?P<number>-?\d+(\.\d+)?)(?P<suffix>[kmgt]|[KMGT]i?)?B?")
_WITH_SUFFIX_UNITS = ("bytes", "tokens")
_LIST_HELP = "several: separated by spaces or commas, or a JSON list"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and which never guesses an abbreviated flag.

    `source` names the file that is being parsed, empty for the command line.
    """

    source = ""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {self.source}{message} (see {self.prog} --help)\n")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


class _Collect(argparse.Action):
    """Gathers the values of a list flag over its occurrences."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        earlier = getattr(namespace, self.dest, ())
        setattr(namespace, self.dest, (*earlier, *(item for part in values for item in part)))


def parse_amount(text: str) -> int:
    """Return a whole number written with a suffix: k, m, g, t are powers of 1000, K, M, G, T (or Ki, ...) of 1024.

    Raises argparse.ArgumentTypeError, also when the product is no whole number.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 32k or 4Gi")
    amount = Decimal(match["number"]) * _FACTORS[match["suffix"] or ""]
    if amount != int(amount):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(amount)


def add_flags(parser: argparse._ActionsContainer, settings: type[SettingsClass], *, skip: Sequence[str] = ()) -> None:
    """Add one flag per field of `settings`, except fields named in `skip`. Absent flags stay absent in the namespace."""
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if field.name not in skip:
            _add_flag(parser, field, hints[field.name])


def given_values(arguments: argparse.Namespace, settings: type[SettingsClass]) -> dict[str, Any]:
    """Return the values of `settings` that were given, by field name."""
    names = [field.name for field in dataclasses.fields(settings)]
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def required_fields(settings: type[SettingsClass]) -> list[str]:
    """Return the names of fields without a default."""
    return [
        field.name
        for field in dataclasses.fields(settings)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def to_argv(values: Mapping[str, Any], settings: type[SettingsClass]) -> list[str]:
    """Return arguments that `add_flags` parses into `values` again; positional ones come first."""
    positional: list[str] = []
    flags: list[str] = []
    for field in dataclasses.fields(settings):
        if field.name not in values:
            continue
        value = values[field.name]
        flag = _flag(field)
        if not flag:
            positional.append(str(value))
        elif isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, (tuple, dict)):
            flags.append(f"{flag}={json.dumps(value)}")
        else:
            flags.append(f"{flag}={value}")
    return [*positional, *flags]


def parse_with_config(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line whose `--config FILE` fills in what the line itself does not give."""
    given = parser.parse_args(arguments)
    filename: str | None = getattr(given, "config", None)
    if filename is None:
        return given
    merged = _read_config_file(parser, filename)
    for name, value in vars(given).items():
        setattr(merged, name, value)
    return merged


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--config`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of flag names and values; the command line wins over it.",
    )


def _read_config_file(parser: Parser, filename: str) -> argparse.Namespace:
    """Return what a YAML file sets, checked like a command line; errors exit through `parser.error`.

    Keys are flag names with dashes or underscores; groups may nest them; `model` is the positional argument.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(filename).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"cannot read {filename}: {' '.join(str(error).split())}")
    parser.source = f"{filename}: "
    if not isinstance(content, dict):
        parser.error("not a mapping of flag names to values")
    namespace = parser.parse_args(_config_tokens(content))
    parser.source = ""
    return namespace


def _config_tokens(content: Mapping[Any, Any]) -> list[str]:
    tokens: list[str] = []
    for key, value in content.items():
        flag = f"--{str(key).replace('_', '-')}"
        if isinstance(value, dict):
            tokens += _config_tokens(value)
        elif key == "model":
            tokens.insert(0, str(value))
        elif isinstance(value, bool):
            tokens.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, list):
            tokens.append(f"{flag}={json.dumps(value)}")
        elif value is not None:
            tokens.append(f"{flag}={value}")
    return tokens


def _flag(field: dataclasses.Field[Any]) -> str:
    declared: str | None = field.metadata.get("flag")
    if declared is None:
        return f"--{field.name.replace('_', '-')}"
    return declared


def _add_flag(parser: argparse._ActionsContainer, field: dataclasses.Field[Any], hint: Any) -> None:
    flag = _flag(field)
    kind = _without_none(hint)
    options: dict[str, Any] = {"default": argparse.SUPPRESS}
    names = [flag, *field.metadata.get("alias", ())]
    help_text: str = field.metadata["help"]
    unit: str = field.metadata.get("unit", "")
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(kind) is tuple:
        options |= {"action": _Collect, "nargs": "+", "type": _split, "metavar": _metavar(field, unit)}
        help_text = f"{help_text.rstrip('.')} ({_LIST_HELP})."
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        options |= {"type": _choice(kind), "metavar": "{" + ",".join(kind) + "}"}
    else:
        options |= {"type": _converter(kind, unit), "metavar": _metavar(field, unit)}
    options["help"] = _help(help_text, field, unit)
    if flag:
        parser.add_argument(*names, dest=field.name, **options)
    else:
        options.pop("metavar")
        parser.add_argument(field.name, nargs="?", metavar=field.name.upper(), **options)


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(members) == 1:
            return members[0]
    return hint


def _converter(kind: Any, unit: str) -> Callable[[str], Any]:
    if typing.get_origin(kind) is dict:
        return _json_object
    if kind is int:
        return parse_amount if unit in _WITH_SUFFIX_UNITS else _whole_number
    if kind is float:
        return _number
    if kind is str:
        return str
    raise TypeError(f"no flag can hold a {kind}")


def _choice(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    def choose(text: str) -> StrEnum:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} given, allowed: {', '.join(kind)}") from None

    return choose


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _split(text: str) -> list[str]:
    if text.startswith("["):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of texts")
        return value
    return [item.strip() for item in text.split(",") if item.strip()]


def _metavar(field: dataclasses.Field[Any], unit: str) -> str:
    return unit.upper() if unit else field.name.rsplit("_", 1)[-1].upper()


def _help(sentence: str, field: dataclasses.Field[Any], unit: str) -> str:
    """Return the help text: sentence, unit, default where the sentence does not speak of one."""
    notes = [f"in {unit}"] if unit else []
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if default not in (dataclasses.MISSING, None, "", (), False) and default != {}:
        notes.append(f"default: {_shown(default)}")
    text = sentence if not notes else f"{sentence} ({', '.join(notes)})"
    return text.replace("%", "%%")


def _shown(default: Any) -> str:
    if default is True:
        return "on"
    return " ".join(default) if isinstance(default, tuple) else str(default)
