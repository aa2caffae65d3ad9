"""Documents that stay true: every file they link to exists, every `make` target and command they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.cli import COMMANDS

_ROOT = Path(__file__).parents[2]
_PAGES = sorted([*_ROOT.glob("*.md"), *_ROOT.glob("docs/*.md"), *_ROOT.glob("bench/*.md")])
_IDS = [str(page.relative_to(_ROOT)) for page in _PAGES]
# Named as what is still to come.
_FUTURE = {"operator"}


@pytest.mark.parametrize("page", _PAGES, ids=_IDS)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))

    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", _PAGES, ids=_IDS)
def test_make_targets_and_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    makefile = (_ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))

    named = {name for group in re.findall(r"`?make ((?:[a-z]+ ?)+)", text) for name in group.split()}
    in_code = {name for name in named if f"`make {name}" in text or f"\nmake {name}" in text}
    assert in_code - targets == set()
    commands = set(re.findall(r"(?:`|\n)kvferry ([a-z]+)", text))
    assert commands - set(COMMANDS) - _FUTURE == set()


def test_the_readme_gives_both_commands_a_line_of_their_own() -> None:
    lines = (_ROOT / "README.md").read_text(encoding="utf-8").splitlines()

    assert "make demo" in lines
    assert "make test" in lines
