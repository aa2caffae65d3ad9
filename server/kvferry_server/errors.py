"""Every error an HTTP client can see, in one tree; `middleware.errors` turns them into the body of the path's dialect.

Status, `type` and `param` follow the HTTP reference, section 2.
"""

from __future__ import annotations


class ApiError(Exception):
    """Base: `status` and `type` are fixed per class, `param` names the offending field."""

    status = 500
    type = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequestError(ApiError):
    """A semantic check failed."""

    status = 400
    type = "BadRequestError"


class SchemaError(ApiError):
    """The body does not fit its schema (or is not JSON)."""

    status = 400
    type = "Bad Request"


class NotFoundError(ApiError):
    status = 404
    type = "NotFoundError"


class PayloadTooLargeError(ApiError):
    status = 413
    type = "Request Entity Too Large"


class TooManyRequestsError(ApiError):
    """The router's queue limit for new requests is reached."""

    status = 429
    type = "Too Many Requests"


class NotImplementedByModelError(ApiError):
    status = 501
    type = "NotImplementedError"


class ServiceUnavailableError(ApiError):
    """No usable engine, or the engines have no room."""

    status = 503
    type = "Service Unavailable"


class EngineFailedError(ApiError):
    """The request was running and could not be finished anywhere."""

    status = 500
    type = "InternalServerError"
