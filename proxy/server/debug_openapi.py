"""The debug port, described in OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from proxy import __version__


def description(*, needs_key: bool = False) -> dict[str, Any]:
    """Return the description; ``needs_key``: the port is opened by a key."""
    guarded = {
        "401": _error("the key is missing or wrong"),
        "403": _error("it was called by a name that is not its own"),
    }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "slai-proxy, debug port",
            "version": __version__,
            "description": "For whoever runs the proxy. It only shows; nothing can be changed by it.",
        },
        "paths": {
            "/debug/state": _get("What is believed of engines, and who waits", _json("The state", _STATE), guarded),
            "/debug/requests/{id}": _get(
                "The life of one request, of those that run and the last 1,000 that have ended",
                _json("Its life", _STORY) | {"404": _error("it has never been here, or has ended long ago")},
                guarded,
                parameters=[
                    {
                        "name": "id",
                        "in": "path",
                        "required": True,
                        "description": "Its x-request-id, or the proxy's own number of it",
                        "schema": {"type": "string", "minLength": 1},
                    }
                ],
            ),
            "/debug/config": _get("The settings in force", _json("The settings", _CONFIG), guarded),
            "/metrics": _get(
                "Metrics for Prometheus",
                {"200": {"description": "All metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}},
                guarded,
            ),
            "/live": _get(
                "A page that shows the state as it changes",
                {"200": {"description": "The page", "content": {"text/html": {"schema": {"type": "string"}}}}},
                {},
            ),
            "/livez": _get("Whether the process lives", _json("It does", _object(live={"const": True})), {}),
            "/readyz": _get(
                "Whether requests should be sent to it",
                _json("They should", _READY) | {"503": _json("They should not", _READY)["200"]},
                {},
            ),
            "/openapi.json": _get("This", _json("This", {"type": "object"}), guarded),
        },
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
    if needs_key:
        for path, operations in found["paths"].items():
            if path not in ("/live", "/livez", "/readyz"):
                operations["get"]["security"] = [{"key": []}]
    return found


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


_COUNT = {"type": "integer", "minimum": 0}
_READY = _object(ready={"type": "boolean"}, draining={"type": "boolean"})
_STATE = _object(
    draining={"type": "boolean"},
    waiting=_COUNT,
    dispatched=_COUNT,
    engines=_array(_object(id={"type": "string"}, up={"type": "boolean"})),
    queues=_array({"type": "object"}),
    config={"type": "object"},
    fleet={"type": ["object", "null"]},
)
_STORY = _object(
    request_id={"type": "string"},
    client_id={"type": "string"},
    stage={"type": "string"},
    model=_or_null("string"),
    prompt_tokens=_or_null("integer"),
    age_seconds={"type": "number"},
    stage_seconds={"type": "object", "additionalProperties": {"type": "number"}},
)
_CONFIG = _object(
    settings={"type": "object"},
    reloads={
        "type": ["object", "null"],
        "properties": {"ok": _COUNT, "failed": _COUNT, "last_error": _or_null("string")},
    },
)


def _json(what: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"200": {"description": what, "content": {"application/json": {"schema": schema}}}}


def _error(what: str) -> dict[str, Any]:
    schema = _object(error={"type": "string"})
    return {"description": what, "content": {"application/json": {"schema": schema}}}


def _get(
    summary: str, responses: dict[str, Any], more: dict[str, Any], *, parameters: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": responses | more, "parameters": parameters or []}}
