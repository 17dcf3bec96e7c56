"""The OpenAPI description: FastAPI's own routes plus those served in front of it or read raw."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.gateway import schema

_REF = "#/components/schemas/{name}"
_BODIES = {
    "/v1/completions": (schema.CompletionRequest, "Complete one or more prompts"),
    "/v1/chat/completions": (schema.ChatRequest, "Answer a conversation"),
    "/tokenize": (schema.TokenizeRequest, "Text or messages to token ids"),
    "/detokenize": (schema.DetokenizeRequest, "Token ids to text"),
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    "400": "A field is wrong; `param` names it",
    "401": "No valid API key",
    "404": "No such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "Not plain JSON",
    "429": "Too many requests wait; see Retry-After",
    "500": "A fault here",
    "503": "Nothing can serve the model now; see Retry-After",
    "504": "The request took longer than allowed",
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole document."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    types = [type_ for type_, _ in _BODIES.values()]
    bodies, components = msgspec.json.schema_components(types, ref_template=_REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update({**components, "Error": _ERROR})
    for (path, (_, summary)), body in zip(_BODIES.items(), bodies, strict=True):
        document["paths"][path] = {"post": _operation(path, summary, body)}
    return document


def _operation(path: str, summary: str, body: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path.startswith("/v1/"):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "Whole, or events with stream=true", "content": content},
            **{status: {"description": text, "content": error} for status, text in _STATUSES.items()},
        },
    }
