"""The one error type that reaches a client, and the table of reasons with their HTTP and gRPC codes."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Why a request was not answered: (label in metrics and bodies, HTTP status, gRPC status name)."""

    INVALID = ("invalid", 400, "INVALID_ARGUMENT")
    UNAUTHENTICATED = ("unauthenticated", 401, "UNAUTHENTICATED")
    FORBIDDEN = ("forbidden", 403, "PERMISSION_DENIED")
    NOT_FOUND = ("not_found", 404, "NOT_FOUND")
    METHOD = ("method", 405, "UNIMPLEMENTED")
    SLOW_BODY = ("slow_body", 408, "DEADLINE_EXCEEDED")
    MODEL_REFUSED = ("model_refused", 409, "FAILED_PRECONDITION")
    TOO_LARGE = ("too_large", 413, "RESOURCE_EXHAUSTED")
    QUEUE_FULL = ("queue_full", 429, "RESOURCE_EXHAUSTED")
    CANCELLED = ("cancelled", 499, "CANCELLED")
    INTERNAL = ("internal", 500, "INTERNAL")
    WOULD_EXPIRE = ("would_expire", 503, "RESOURCE_EXHAUSTED")
    UNAVAILABLE = ("unavailable", 503, "UNAVAILABLE")
    DRAINING = ("draining", 503, "UNAVAILABLE")
    DEADLINE_ADMIT = ("deadline_admit", 504, "DEADLINE_EXCEEDED")
    DEADLINE_QUEUE = ("deadline_queue", 504, "DEADLINE_EXCEEDED")
    DEADLINE_RESPONSE = ("deadline_response", 504, "DEADLINE_EXCEEDED")

    def __init__(self, label: str, http: int, grpc: str) -> None:
        self.label = label
        self.http = http
        self.grpc = grpc

    @property
    def retryable(self) -> bool:
        """True where the same request may succeed a moment later."""
        return self in (Reason.QUEUE_FULL, Reason.WOULD_EXPIRE, Reason.UNAVAILABLE, Reason.DRAINING)


class ServingError(Exception):
    """An answer other than success. `str(error)` is the message a client reads; `counted` is set once it
    stands in the metrics."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.counted = False


def invalid(message: str) -> ServingError:
    """The error for malformed input; `message` starts with the field at fault."""
    return ServingError(Reason.INVALID, message)
