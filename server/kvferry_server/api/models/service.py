"""Model cards: one per served name."""

from __future__ import annotations

import time
from typing import Any

from kvferry_server.errors import NotFoundError, ServiceUnavailableError
from kvferry_server.requests import Gateway

OWNER = "kvferry"


class ModelService:
    """Describes the served model. Raises ServiceUnavailableError before the first engine is usable."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def cards(self) -> dict[str, Any]:
        """Return the answer of GET /v1/models."""
        return {"object": "list", "data": self._cards()}

    def get(self, name: str) -> dict[str, Any]:
        """Return the card of one served name. Raises NotFoundError."""
        for card in self._cards():
            if card["id"] == name:
                return card
        raise NotFoundError(f"The model `{name[:200]}` does not exist.", param="model")

    def _cards(self) -> list[dict[str, Any]]:
        view = self._gateway.model()
        if view is None:
            raise ServiceUnavailableError("No engine is ready yet.", retry_after_s=1.0)
        now = int(time.time())
        return [_card(name, view.info.root, view.info.max_model_len, now) for name in view.info.names]


def _card(name: str, root: str, max_model_len: int, now: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": OWNER,
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": now,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
