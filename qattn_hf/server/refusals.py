"""Refusals of requests, in the body that clients of OpenAI's API read."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from qattn_hf.messages import cut

LONGEST = 1000  # characters of a message
TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
LATER = {"Retry-After": "1"}  # seconds
MEMBERS = ("str", "int", "float", "constrained-str")  # of unions, as pydantic names them


class Refused(Exception):
    """A request that is not served.

    Args:
        message: what happened, why, and what to send instead.
        status: of the response. param: the field of the body that is at fault. code: a word for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The response's body: `{"error": {"message", "type", "param", "code"}}`."""
        # a client may send half of a surrogate pair, which UTF-8 cannot write
        message = cut(str(self), LONGEST).encode("utf-8", "backslashreplace").decode()
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response of this refusal."""
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: LATER, 503: LATER}.get(self.status)
        return JSONResponse(self.body(), self.status, headers)


def of_validation(error: RequestValidationError) -> Refused:
    """What a body of a wrong shape is told: the first field at fault, and why."""
    found = error.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        return Refused('the body is no JSON: send an object such as {"prompt": "Hello"}', code="invalid_json")
    if first["loc"] == ("body",):
        return Refused(
            'the body is no JSON object: send an object such as {"prompt": "Hello"} with the header '
            "Content-Type: application/json",
            code="invalid_value",
        )
    # of a union pydantic names the member too, as in ("body", "prompt", "list[int]", 1)
    path = [str(part) for part in first["loc"][1:] if "[" not in str(part) and part not in MEMBERS]
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return Refused(f"the field {param} is unknown to this server: leave it out", param=param, code="unknown_field")
    reasons = dict.fromkeys(one["msg"] for one in found if one["loc"][:2] == first["loc"][:2])
    return Refused(f"{param or 'the body'}: {'; or '.join(reasons)}", param=param, code="invalid_value")


def install(app: FastAPI) -> None:
    """Let every error of `app` have OpenAI's body."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return Refused(message, status=error.status_code).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        message = f"the server failed at this request ({type(error).__name__}); its log has the traceback"
        return Refused(message, status=500).response()
