"""Routes. The generating endpoints are plain ASGI in front of FastAPI, which carries everything else."""

import time
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from services.gateway import limits, schema
from services.gateway.auth import Keys
from services.gateway.errors import INTERNAL_ERROR, ApiError, invalid
from services.gateway.gateway import Gateway
from services.gateway.incoming import Incoming
from services.gateway.openapi import describe
from services.gateway.outlet import Headers
from services.gateway.plan import no_such_model, plain_messages
from shared.runtime.http import App

log = structlog.get_logger()

Raw = Callable[[Incoming, Any, str], Awaitable[None]]

_NOTHING_HERE = (
    "There is nothing at this path. GET /docs shows what there is, for people; the API begins at /v1."
)

_OPEN_PATHS = frozenset(("/health", "/ready"))
"""Probes of a load balancer or a cluster carry no key; to them /ready says yes or no and nothing else."""


class Front:
    """Outermost ASGI app: normal paths, request ids, keys, errors, the shortest way for tokens."""

    def __init__(self, gateway: Gateway, keys: Keys, ops_app: App, rest: App) -> None:
        self._gateway = gateway
        self._keys = keys
        self._ops = ops_app
        self._rest = rest
        self._raw: dict[str, Raw] = {
            "/v1/completions": gateway.completions,
            "/v1/chat/completions": gateway.chat,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        incoming = Incoming(scope, receive)
        try:
            tenant = "" if incoming.path in _OPEN_PATHS else self._keys.tenant(incoming.authorization)
            raw = self._raw.get(incoming.path)
            if raw is not None:
                if incoming.method != "POST":
                    raise ApiError(405, f"Use POST for {incoming.path}.", code="method_not_allowed")
                await raw(incoming, send, tenant)
                return
            # FastAPI sees the normal path, and every answer gets the request's id.
            scope = {**scope, "path": incoming.path, "raw_path": incoming.path.encode()}
            app = self._ops if incoming.path in ("/health", "/metrics") else self._rest
            await app(scope, receive, _with_request_id(send, incoming.request_id))
        except ApiError as error:
            self._gateway.note_error(error, incoming)
            await _answer(send, error, incoming.request_id)


def build(gateway: Gateway, keys: Keys, ops_app: App) -> Front:
    """The whole HTTP interface. `ops_app` answers /health and /metrics."""
    card, version = gateway.card, metadata.version("hortator")
    created = int(time.time())
    app = FastAPI(title="Hortator", version=version, redirect_slashes=False)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)

    def model_object() -> dict[str, Any]:
        return {
            "id": card.name,
            "object": "model",
            "created": created,
            "owned_by": "hortator",
            "root": card.name,
            "parent": None,
            "max_model_len": card.max_len,
            "context_length": card.max_len,
            "aliases": sorted(card.aliases),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_object()]}

    @app.get("/v1/models/{name:path}", responses={404: {"description": "No such model"}})
    async def model(name: str) -> dict[str, Any]:
        if not card.knows(name):
            raise no_such_model(name)
        return model_object()

    @app.get("/version")
    async def version_() -> dict[str, str]:
        return {"version": version}

    @app.get("/ready", responses={503: {"description": "The mesh does not answer; `reason` says why"}})
    async def ready(request: Request) -> Response:
        state = gateway.canary.readiness()
        answer: dict[str, Any] = {"ready": state.ok}
        if keys.opens(request.headers.get("authorization", "").encode("latin-1")):
            answer |= {"reason": state.reason, "model": card.name}
        body = schema.dump(answer)
        headers = {} if state.ok else {"retry-after": "1"}
        return Response(body, 200 if state.ok else 503, headers, "application/json")

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": card.max_len}
        return {**kind, **card.template_names, "chat_template": card.chat_template}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body: schema.TokenizeRequest = await _body(gateway, request, schema.TOKENIZE)
        _check_model(gateway, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "Give either prompt or messages.")
        if body.prompt is not None:
            ids = await gateway.planner.ids_of(body.prompt, add_special=body.add_special_tokens)
        else:
            generate = body.add_generation_prompt and not body.continue_final_message
            messages = plain_messages(body.messages)
            ids = await gateway.planner.ids_of_chat(
                messages, generate=generate, keep_open=body.continue_final_message
            )
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": card.max_len, "tokens": ids}
        answer["token_strs"] = (
            [card.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
        )
        return Response(schema.dump(answer), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body: schema.DetokenizeRequest = await _body(gateway, request, schema.DETOKENIZE)
        _check_model(gateway, body.model)
        limits.check_ids("tokens", body.tokens, card.vocab_size)
        text = card.decode(body.tokens, skip_special=body.skip_special_tokens)
        return Response(schema.dump({"prompt": text}), media_type="application/json")

    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(describe(app))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return Front(gateway, keys, ops_app, app)


async def _body(gateway: Gateway, request: Request, bodies: schema.Body) -> Any:
    incoming = Incoming(request.scope, request.receive)
    return bodies.decode(
        await incoming.body(gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)
    )


def _check_model(gateway: Gateway, name: str | None) -> None:
    if name is not None and not gateway.card.knows(name):
        raise no_such_model(name)


def _with_request_id(send: Any, request_id: bytes) -> Any:
    async def wrapped(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
        await send(message)

    return wrapped


async def _answer(send: Any, error: ApiError, request_id: bytes) -> None:
    body = error.body()
    headers: Headers = [
        *error.headers(),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _response(error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _response(ApiError(404, _NOTHING_HERE, code="not_found"))
    if error.status_code == 405:
        return _response(ApiError(405, "This method is not allowed here.", code="method_not_allowed"))
    return _response(ApiError(error.status_code, str(error.detail)))


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error, path=request.url.path)
    return _response(INTERNAL_ERROR)
