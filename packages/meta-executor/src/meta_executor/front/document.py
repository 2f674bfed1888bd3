"""The service described for programs and people: an OpenAPI document from the types that requests are read with, and a page."""

from __future__ import annotations

import functools
import html
from typing import Any

import msgspec

from meta_executor import __version__
from meta_executor.front import openai

_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
#: What a field that is looked at as raw JSON may be.
_RAW: dict[str, dict[str, Any]] = {
    "prompt": {
        "oneOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
            {"type": "array", "minItems": 1, "items": _TOKEN_ID},
            {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": _TOKEN_ID}},
        ]
    },
    "tokens": {"type": "array", "items": _TOKEN_ID},
    "chat_template_kwargs": {
        "type": ["object", "null"],
        "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
    },
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
#: Status and what it says, of everything that has a body.
_REFUSALS = {
    "400": "A field is wrong, or asks for what is not served; param names it",
    "401": "An API key is asked for",
    "404": "Not served here",
    "405": "Another method",
    "408": "The request did not come whole in time",
    "413": "The body is too large",
    "429": "Busy; try again",
    "431": "The head is too large",
    "499": "The client left",
    "500": "The front failed",
    "502": "An instance failed",
    "503": "Cannot serve now; try again",
    "504": "Not answered in time",
}
_BODIES: dict[str, tuple[str, str, type[msgspec.Struct]]] = {
    "/v1/completions": ("completions", "Continue a text, or several", openai.CompletionRequest),
    "/v1/chat/completions": ("chat_completions", "Answer a conversation", openai.ChatRequest),
    "/tokenize": ("tokenize", "The tokens of a text or a conversation", openai.TokenizeRequest),
    "/detokenize": ("detokenize", "The text of tokens", openai.DetokenizeRequest),
}
_QUESTIONS = {
    "/v1/models": ("models", "The model and its names", "200"),
    "/health": ("health", "200: a request can be served now", "200 503"),
    "/live": ("live", "The process answers", "200"),
    "/ping": ("ping", "As /health", "200 503"),
    "/load": ("load", "Answers that are being made now", "200"),
    "/version": ("version", "Of the service", "200"),
    "/server_info": ("server_info", "What is served by which instances", "200"),
    "/cluster_info": ("cluster_info", "The instances and their states", "200"),
    "/perf_metrics": ("perf_metrics", "Both legs of requests that have ended since the last call", "200"),
}


@functools.cache
def openapi_document(names: tuple[str, ...]) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        names: Names under which the model is asked for.
    """
    schemas, components = msgspec.json.schema_components(
        [kind for _, _, kind in _BODIES.values()], ref_template="#/components/schemas/{name}"
    )
    for component in components.values():
        for name, field in component.get("properties", {}).items():
            if name in _RAW and not set(field) - {"default"}:
                field.update(_RAW[name])
        if "model" in component.get("properties", {}):
            required = "model" in component.get("required", ())
            component["properties"]["model"] = {"enum": [*names] if required else [*names, None]}
    paths: dict[str, Any] = {}
    for (path, (name, words, _)), schema in zip(_BODIES.items(), schemas, strict=True):
        answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if path.startswith("/v1/"):
            answer["text/event-stream"] = {"schema": {}}
        paths[path] = {
            "post": {
                "operationId": name,
                "summary": words,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": "Done", "content": answer}, **_refusals()},
            }
        }
    for path, (name, words, statuses) in _QUESTIONS.items():
        described = {
            status: {"description": words, "content": {"application/json": {"schema": {}}}}
            for status in statuses.split()
        }
        paths[path] = {"get": {"operationId": name, "summary": words, "responses": {**_refusals(), **described}}}
    paths["/ping"]["post"] = {**paths["/ping"]["get"], "operationId": "ping_by_post"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "meta-executor", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # With and without an API key: whether one is asked for is the service's configuration.
        "security": [{}, {"key": []}],
    }


def _refusals() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": words, "content": content} for status, words in _REFUSALS.items()}


@functools.cache
def documentation_page(names: tuple[str, ...]) -> str:
    """A page for people; it needs nothing from anywhere else."""
    document = openapi_document(names)
    rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            fields = ""
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                schema = document["components"]["schemas"][reference.rsplit("/", 1)[1]]
                required = set(schema.get("required", ()))
                fields = ", ".join(
                    f"<b>{html.escape(name)}</b>" if name in required else html.escape(name)
                    for name in schema["properties"]
                )
            rows.append(
                f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
                f"<td>{html.escape(operation['summary'])}</td><td>{fields}</td></tr>"
            )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>meta-executor</title>"
        "<style>body{font-family:sans-serif;margin:2em}td{padding:.3em .8em;vertical-align:top}</style>"
        f"<h1>meta-executor {html.escape(__version__)}</h1>"
        "<p>The OpenAI API, and what operators ask. Required fields are bold. "
        "<a href=/openapi.json>OpenAPI document</a></p>"
        f"<table>{''.join(rows)}</table></html>"
    )
