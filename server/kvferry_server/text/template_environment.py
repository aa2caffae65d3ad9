"""The sandbox that chat templates run in: Hugging Face's extras for templates, and limits on time and size.

A template is code from a model's author, or (when trusted) from a client. Jinja's sandbox keeps it away from Python
objects; this module adds a deadline checked in every loop, a limit on the output, and limits on the usual ways to make
huge strings.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 16 << 20
MAX_STRING_CHARS = 16 << 20
TICK = "__kvferry_tick__"

_GROWING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class TemplateLimitError(Exception):
    """A template ran too long or wrote too much."""


class GenerationBlock(Extension):
    """`{% generation %}`: marks assistant text for training; here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja with Hugging Face's names and our limits; compiled templates may be rendered from several threads at once."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        self.filters["tojson"] = _to_json
        for name in ("center", "indent"):
            self.filters[name] = _bounded(self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _GROWING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateLimitError("chat templates may not use **")
        if operator == "%" and isinstance(left, str) and any(c.isdigit() or c == "*" for c in left):
            raise TemplateLimitError("chat templates may not use widths in % formats")
        if operator == "*":
            for sized, factor in ((left, right), (right, left)):
                if isinstance(sized, (str, list, tuple)) and isinstance(factor, int):
                    _check_size(len(sized) * factor)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def compile_chat_template(self, source: str) -> jinja2.Template:
        """Compile a template whose loops call `TICK`. Raises jinja2.TemplateSyntaxError, RecursionError for deep nesting."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            call = nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))


def render(template: jinja2.Template, variables: dict[str, Any], *, timeout_s: float) -> str:
    """Render a compiled template within its limits.

    Raises TemplateLimitError past them, jinja2.TemplateError for errors of the template, and whatever Python error a
    template provokes (TypeError, RecursionError, ...).
    """
    deadline = time.monotonic() + timeout_s

    def tick() -> None:
        if time.monotonic() > deadline:
            raise TemplateLimitError(f"the chat template took longer than {timeout_s:g} s")

    return _join(template.generate({**variables, TICK: tick}), tick)


def _join(pieces: Iterable[str], tick: Callable[[], None]) -> str:
    written: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_OUTPUT_CHARS:
            raise TemplateLimitError(f"the chat template wrote more than {MAX_OUTPUT_CHARS} characters")
        tick()
        written.append(piece)
    return "".join(written)


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_STRING_CHARS:
        raise TemplateLimitError(f"the chat template made a value of {num_chars} elements")


def _bounded(grow: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter whose width argument would otherwise make strings of any size."""

    def bounded(value: Any, *arguments: Any, **options: Any) -> Any:
        for width in (*arguments, *options.values()):
            if isinstance(width, int):
                _check_size(width * max(1, str(value).count("\n")))
        return grow(value, *arguments, **options)

    return bounded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without HTML escaping, as templates are written for."""
    if isinstance(indent, int):
        _check_size(indent * 1000)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    # Templates ask for today's date in the words of their model; local time is what Hugging Face gives them.
    return datetime.datetime.now().strftime(format)
