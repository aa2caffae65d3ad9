"""The `kvferry` command as a person meets it: help, mistakes, exit codes; and that it starts light."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from kvferry import cli

_ROOT = Path(__file__).parents[2]


def test_without_a_command_it_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2

    assert capsys.readouterr().out.startswith("usage: kvferry COMMAND")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0

    text = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if f"\n  {name} " not in text] == []


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])

    assert caught.value.code == 0
    assert f"usage: kvferry {name}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["version"], ["--version"], ["-v"]])
def test_the_version_is_one_word(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(words) == 0

    assert capsys.readouterr().out == version("kvferry") + "\n"


def test_the_crd_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["crd"]) == 0

    assert capsys.readouterr().out == (_ROOT / "crds" / "llmservice.yaml").read_text(encoding="utf-8")


def test_a_mistyped_command_is_recognized(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serv"]) == 2

    assert capsys.readouterr().err == "kvferry: error: no command 'serv'; did you mean serve?\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine"], "a MODEL is required"),
        (["serve"], "a MODEL is required"),
        (["engine", "m", "--dtype", "int4"], "allowed: auto, bfloat16, float16, float32"),
        (["engine", "m", "--max-num-seqs", "x"], "'x' is not a whole number"),
        (["engine", "m", "--tensor-paralel-size", "2"], "unrecognized arguments: --tensor-paralel-size 2"),
        (["router", "--decode", "static:h:1", "--api-key", '[""]'], "api_key has an empty key"),
        (["router", "--policy", "best"], "allowed: kv_aware, least_load, round_robin"),
        (["up"], "required: -f/--filename"),
        (["bench", "serve", "--num-prompts", "0"], "--num-prompts: 0 given, it must be greater than 0"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)

    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: LLMService", "error: apiVersion: missing, kvferry.dev/v1alpha1 is required\n"),
        ("{", "error: not readable as YAML: "),
    ],
)
def test_a_wrong_manifest_is_told_line_by_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)

    assert cli.main(["up", "-f", str(path)]) == 1

    assert capsys.readouterr().err.startswith(message)


def test_a_missing_manifest_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "-f", "/nonexistent/m.yaml"]) == 1

    assert capsys.readouterr().err == "error: /nonexistent/m.yaml: No such file or directory\n"


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    for name in [name for name in sys.modules if name.startswith(("kvferry_operator", "kvferry.commands"))]:
        monkeypatch.delitem(sys.modules, name)

    assert cli.main(["up", "-f", "x"]) == 1

    assert "the Python package jsonschema is missing; install kvferry[all]" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["router", "up", "crd", "chat", "bench"])
def test_commands_of_small_images_import_no_torch(name: str) -> None:
    program = f"""
import sys
from kvferry import cli
try:
    cli.main([{name!r}, "--help"])
except SystemExit:
    pass
print(sorted({{"torch", "transformers", "kopf", "fastapi", "zmq"}} & set(sys.modules)))
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert output.splitlines()[-1] == "[]"
