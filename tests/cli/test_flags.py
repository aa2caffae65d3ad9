"""Flags made from settings: every kind of field, its conversions, its errors, and the way back to a command line."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from kvferry.flags import Parser, add_config_flag, add_flags, given_values, parse_amount, parse_with_config, to_argv
from kvferry_engine.config import setting


class Colour(StrEnum):
    RED = "red"
    DARK_BLUE = "dark_blue"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    model: str = setting("The model.", flag="")
    names: tuple[str, ...] = setting("Names.", alias=("-n",), default=())
    colour: Colour = setting("Colour, 100 % of it.", default=Colour.RED)
    is_fast: bool = setting("Speed.", default=False)
    is_safe: bool = setting("Safety.", default=True)
    size: int | None = setting("Size.", unit="bytes", default=None)
    length: int = setting("Length.", unit="tokens", default=7)
    count: int = setting("Count.", default=3)
    share: float = setting("Share.", default=0.5)
    extra: dict[str, Any] = setting("More (JSON).", default_factory=dict)


def _parser() -> Parser:
    parser = Parser(prog="test")
    add_flags(parser, Settings)
    add_config_flag(parser)
    return parser


def _values(*words: str) -> dict[str, Any]:
    return given_values(parse_with_config(_parser(), words), Settings)


def _error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        _values(*words)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], {}),
        (["m"], {"model": "m"}),
        (["m", "--names", "a", "b"], {"model": "m", "names": ("a", "b")}),
        (["--names", "a", "--names", "b,c"], {"names": ("a", "b", "c")}),
        (["-n", '["a,b"]'], {"names": ("a,b",)}),
        (["--colour", "dark_blue"], {"colour": Colour.DARK_BLUE}),
        (["--is-fast", "--no-is-safe"], {"is_fast": True, "is_safe": False}),
        (["--size=4G", "--length", "32k"], {"size": 4 << 30, "length": 32_000}),
        (["--count", "-1", "--share", "0.25"], {"count": -1, "share": 0.25}),
        (["--extra", '{"a": [1]}'], {"extra": {"a": [1]}}),
    ],
)
def test_what_is_given_is_understood(words: list[str], values: dict[str, Any]) -> None:
    assert _values(*words) == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--colour", "green"], "argument --colour: 'green' given, allowed: red, dark_blue"),
        (["--count", "1.5"], "argument --count: '1.5' is not a whole number"),
        (["--share", "half"], "argument --share: 'half' is not a number"),
        (["--size", "4Q"], "argument --size: '4Q' is not a number such as 4096, 32k or 4Gi"),
        (["--length", "1.5"], "'1.5' is not a whole number"),
        (["--extra", "[1]"], "'[1]' is not a JSON object"),
        (["--names", "[1]"], "'[1]' is not a JSON list of texts"),
        (["--is-fas"], "unrecognized arguments: --is-fas"),
        (["--names"], "expected at least one argument"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    line = _error(capsys, *words)

    assert line.startswith("test: error: ")
    assert message in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("17", 17), ("1k", 1000), ("1K", 1024), ("2m", 2_000_000), ("2M", 2 << 20), ("1.5k", 1500), ("512Mi", 512 << 20),
        ("1T", 1 << 40), ("4GB", 4 << 30), ("-1", -1),
    ],
)  # fmt: skip
def test_amounts(text: str, amount: int) -> None:
    assert parse_amount(text) == amount


def test_values_survive_the_way_to_a_command_line_and_back() -> None:
    values = {
        "model": "m",
        "names": ("a b", "c,d"),
        "colour": Colour.DARK_BLUE,
        "is_fast": False,
        "is_safe": True,
        "size": 5,
        "share": -0.5,
        "extra": {"a": "b c"},
    }

    assert _values(*to_argv(values, Settings)) == values


def test_the_command_line_wins_over_the_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: m\nnames: [a, b]\nis-fast: true\nis_safe: false\ngroup:\n  length: 2k\n  count: 9\nextra: null\n"
    )

    values = _values("--config", str(path), "--names", "c", "--count=1")

    assert values == {
        "model": "m", "names": ("c",), "is_fast": True, "is_safe": False, "length": 2000, "count": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("unknown: 1", "c.yaml: unrecognized arguments: --unknown=1"),
        ("count: many", "c.yaml: argument --count: 'many' is not a whole number"),
        ("- a", "c.yaml: not a mapping of flag names to values"),
        ("a: [", "cannot read"),
    ],
)
def test_errors_of_the_configuration_file_name_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)

    line = _error(capsys, "--config", str(path))

    assert message in line
    assert line.count("\n") == 1


def test_help_tells_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _values("--help")

    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "Length. (in tokens, default: 7)" in text
    assert "Colour, 100 % of it. (default: red)" in text
    assert "Safety. (default: on)" in text
