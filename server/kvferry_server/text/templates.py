"""Chat messages to the prompt text of one model: which template, which variables, and the open last message.

Messages arrive as `normalise`d dictionaries (`messages`). Everything here is slow enough for a worker thread; `model_text`
puts it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from kvferry_engine.wire.assets import AssetBundle
from kvferry_server.errors import BadRequestError
from kvferry_server.settings import ContentFormat, SettingsError

from .content_format import detect_content_format
from .template_environment import TemplateEnvironment, TemplateLimitError, render

OPEN_MARK = "kvferry-final-message-ends-here "
"""Put behind the message to be continued; the blank at its end shows whether the template trims content."""

_MAX_REQUEST_TEMPLATES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplateOptions:
    """What one request asks of its template besides the messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    """A template of the request itself; the caller has checked that it is trusted."""
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A template with what was found out about it."""

    template: jinja2.Template
    content_format: ContentFormat
    knows_developer_role: bool


class ChatTemplates:
    """The chat templates of one model. Thread-safe."""

    def __init__(
        self, bundle: AssetBundle, *, override: str | None, content_format: ContentFormat, timeout_s: float
    ) -> None:
        self._environment = TemplateEnvironment()
        self._content_format = content_format
        self._timeout_s = timeout_s
        self._special_tokens = dict(bundle.special_tokens)
        self._source = _choose_source(bundle, override)
        self._compiled: dict[str, CompiledTemplate] = {}

    def prepare(self, options: ChatTemplateOptions) -> CompiledTemplate:
        """Return the compiled template for a request. Raises BadRequestError: there is none, or it does not compile."""
        source = options.chat_template or self._source
        if source is None:
            raise BadRequestError(
                "The model has no chat template, and a default chat template is no longer allowed: "
                "start the engine or the router with --chat-template.",
                param="messages",
            )
        compiled = self._compiled.get(source)
        if compiled is None:
            compiled = self._compile(source)
            if len(self._compiled) >= _MAX_REQUEST_TEMPLATES:
                self._compiled.clear()
            self._compiled[source] = compiled
        return compiled

    def render(self, compiled: CompiledTemplate, messages: list[dict[str, Any]], options: ChatTemplateOptions) -> str:
        """Return the prompt text. Raises BadRequestError with the template's own words when it refuses."""
        if options.continue_final_message:
            messages = [*messages[:-1], _with_mark(messages[-1])]
        variables: dict[str, Any] = {
            "tools": None,
            "documents": options.documents,
            **self._special_tokens,
            **options.variables,
            "messages": messages,
            "add_generation_prompt": options.add_generation_prompt,
            "continue_final_message": options.continue_final_message,
        }
        try:
            text = render(compiled.template, variables, timeout_s=self._timeout_s)
        except (jinja2.TemplateError, TemplateLimitError) as error:
            raise BadRequestError(f"The chat template failed: {error}", param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
            kind = type(error).__name__
            raise BadRequestError(f"The chat template failed ({kind}): {error}", param="messages") from error
        return _cut_at_mark(text) if options.continue_final_message else text

    def _compile(self, source: str) -> CompiledTemplate:
        try:
            template = self._environment.compile_chat_template(source)
            chosen = self._content_format
            if chosen is ContentFormat.AUTO:
                chosen = detect_content_format(self._environment, source)
        except jinja2.TemplateError as error:
            raise BadRequestError(f"The chat template does not compile: {error}", param="chat_template") from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise BadRequestError("The chat template is nested too deeply.", param="chat_template") from error
        return CompiledTemplate(template, chosen, knows_developer_role="developer" in source)


def check_override(override: str | None) -> None:
    """Raise SettingsError for a `chat_template` setting that can only be a file and cannot be read."""
    if override is not None and not _is_template_text(override) and ("/" in override or override.endswith(".jinja")):
        _read_file(override, names=[])


def _is_template_text(override: str) -> bool:
    return "{" in override or "\n" in override


def _read_file(path: str, *, names: list[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        known = ", ".join(names) or "none"
        raise SettingsError(
            f"chat_template {path!r} is no template name of the model ({known}), no template text and no readable file"
        ) from error


def _choose_source(bundle: AssetBundle, override: str | None) -> str | None:
    """Return the template to use: the setting (a name in the model, a file, or the template itself), else the model's.

    Raises SettingsError for a file that cannot be read.
    """
    if override is None:
        return bundle.chat_templates.get("default")
    if override in bundle.chat_templates:
        return bundle.chat_templates[override]
    if _is_template_text(override):
        return override
    return _read_file(override, names=sorted(bundle.chat_templates))


def _with_mark(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with `OPEN_MARK` behind its text."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [n for n, part in enumerate(content) if isinstance(part, dict) and "text" in part]
        if not texts:
            raise BadRequestError("The final message has no text to continue.", param="continue_final_message")
        last = texts[-1]
        parts = [*content[:last], {**content[last], "text": content[last]["text"] + OPEN_MARK}, *content[last + 1 :]]
        return {**message, "content": parts}
    return {**message, "content": f"{content or ''}{OPEN_MARK}"}


def _cut_at_mark(text: str) -> str:
    """Return the rendered text up to the end of the final message's content."""
    mark = OPEN_MARK.rstrip()
    position = text.rfind(mark)
    if position < 0:
        raise BadRequestError(
            "The chat template does not show the final message, so it cannot be continued.",
            param="continue_final_message",
        )
    trimmed = not text.startswith(OPEN_MARK, position)
    return text[:position].rstrip() if trimmed else text[:position]
