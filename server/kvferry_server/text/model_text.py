"""Everything textual about the served model, made once per asset bundle and called off the event loop.

`TextLibrary` follows the engines' asset digest: when a new generation of the service brings other assets, the next request
gets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from kvferry_engine.wire.assets import AssetBundle
from kvferry_server.requests import ModelView
from kvferry_server.settings import RouterSettings

from .messages import normalise_messages
from .templates import ChatTemplateOptions, ChatTemplates, check_override
from .tokenizer import ModelTokenizer

Result = TypeVar("Result")


class ModelText:
    """Tokenizer and templates of one model; the async methods run in worker threads."""

    def __init__(self, bundle: AssetBundle, settings: RouterSettings, limiter: anyio.CapacityLimiter) -> None:
        self.bundle = bundle
        self.tokenizer = ModelTokenizer(bundle)
        self.templates = ChatTemplates(
            bundle,
            override=settings.chat_template,
            content_format=settings.chat_template_content_format,
            timeout_s=settings.chat_template_render_timeout,
        )
        self._limiter = limiter

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await self.in_thread(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return await self.in_thread(lambda: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    async def render(self, messages: Iterable[Mapping[str, Any]], options: ChatTemplateOptions) -> str:
        """Return the prompt text of a chat. Raises BadRequestError."""

        def work() -> str:
            compiled = self.templates.prepare(options)
            normal = normalise_messages(
                messages,
                content_format=compiled.content_format,
                knows_developer_role=compiled.knows_developer_role,
            )
            return self.templates.render(compiled, normal, options)

        return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run slow text work in a worker thread; waits while all threads of the limiter are taken."""
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)


class TextLibrary:
    """The `ModelText` of the served model, by asset digest."""

    def __init__(self, settings: RouterSettings) -> None:
        """Raise SettingsError for a chat template file that cannot be read."""
        check_override(settings.chat_template)
        self._settings = settings
        self._limiter: anyio.CapacityLimiter | None = None
        self._lock = asyncio.Lock()
        self._digest = ""
        self._text: ModelText | None = None

    async def get(self, view: ModelView) -> ModelText:
        """Return the text side of `view`; the first call for a bundle takes up to a second, in a thread.

        Raises SettingsError when the configured chat template cannot be read.
        """
        if self._text is not None and self._digest == view.info.assets_digest:
            return self._text
        async with self._lock:
            if self._text is None or self._digest != view.info.assets_digest:
                limiter = self._limiter = self._limiter or anyio.CapacityLimiter(self._settings.tokenizer_threads)
                text = await anyio.to_thread.run_sync(
                    lambda: ModelText(view.assets, self._settings, limiter), limiter=limiter
                )
                self._digest, self._text = view.info.assets_digest, text
            return self._text
