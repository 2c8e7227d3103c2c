"""What a client of the front is told when its request fails: OpenAI's error object with the right status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trtspec.package.contract import QUEUE_FULL
from trtspec.serve.client import RequestFailed

RETRY_AFTER_S = 1
_KINDS = {404: "not_found_error", 429: "rate_limit_error"}


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """One failed request. param: the field that is wrong. code: for programs; None where the status says it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """The JSON body: `{"error": {message, type, param, code}}`."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unavailable(message: str) -> ApiError:
    """503: not now, and nothing is wrong with the request."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(RETRY_AFTER_S)})


def from_server(error: RequestFailed) -> ApiError:
    """What Triton, or the connection to it, said about a request."""
    if error.code == "INVALID_ARGUMENT":  # Triton's inputs have OpenAI's names with a prefix
        return ApiError(400, error.message.replace("sampling_param_", ""))
    if error.code == "UNAVAILABLE" and error.message.startswith(QUEUE_FULL):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(429, error.message, code="queue_full", headers=headers)
    if error.code in ("UNAVAILABLE", "NOT_FOUND"):  # the model is not loaded, or nobody answers
        return unavailable("the model server does not answer; it may be starting or restarting")
    return ApiError(500, error.message, code="engine_error")
