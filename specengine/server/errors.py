"""Errors over HTTP: every one has OpenAI's shape, whatever caused it.

Owns status codes and the body `{"error": {"message", "type", "param", "code"}}`. Knows nothing about routes.

    raise ApiError(404, "the model 'x' does not exist", param="model", code="model_not_found")
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from specengine.errors import EngineError, RequestError
from specengine.log import get_logger

logger = get_logger(__name__)

RETRY_AFTER_SECONDS = 1
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is what access logs show (nginx's number)
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """An answer other than success. `type` follows from the status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def api_error(error: Exception) -> ApiError:
    """The answer that an error of ours becomes. Anything else is a fault here: it is logged, and its words stay inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_unavailable")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def overloaded(message: str) -> ApiError:
    return ApiError(503, message, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Strict JSON: infinities and NaN become null."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_response(error: Exception) -> Response:
    answer = api_error(error)
    return json_response(answer.body(), answer.status, answer.headers)


async def on_error(request: Request, error: Exception) -> Response:
    """The handler of every exception that leaves a route."""
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, which the router answers."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    where = f"{request.method} {request.url.path}"
    if status == 404:
        return error_response(ApiError(404, f"unknown request URL: {where}", code="unknown_url"))
    if status == 405:
        allowed = headers.get("allow") or headers.get("Allow", "")
        message = f"{request.url.path} doesn't take {request.method}; allowed is {allowed}"
        return error_response(ApiError(405, message, code="method_not_supported", headers=headers))
    return error_response(ApiError(status, f"{where}: {HTTPStatus(status).phrase}", headers=headers))
