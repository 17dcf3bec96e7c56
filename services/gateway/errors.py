"""Errors as OpenAI's clients expect them: one envelope, `code` a string or null."""

import orjson


class ApiError(Exception):
    """Becomes {"error": {message, type, param, code}} with `status`. Shows no path and no address."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            # Whole seconds, at least 1: what clients parse.
            seconds = max(1, int(-(-self.retry_after_s // 1)))
            headers.append((b"retry-after", str(seconds).encode()))
        if self.status in (408, 413, 431):
            headers.append((b"connection", b"close"))
        return headers


INTERNAL_ERROR = ApiError(500, "Something went wrong here. It has been logged.", code="internal_error")


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def invalid(param: str | None, message: str, *, code: str | None = "invalid_value") -> ApiError:
    """400 for one field; `message` says what is allowed."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, what: str) -> ApiError:
    return ApiError(
        400, f"{what} Remove {param!r} from the request.", param=param, code="unsupported_parameter"
    )


def too_large(message: str, param: str | None = None) -> ApiError:
    return ApiError(413, message, param=param, code="request_too_large")
