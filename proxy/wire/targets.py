"""Request targets that go to no engine.

An engine may lie behind a path of a gateway, ``https://gateway/team-a``. A target with dot segments would lead out of
it, once the gateway has resolved them: ``/../team-b/v1/models``. Clients resolve them before they send (RFC 3986,
section 5.2.4), so nobody who means well is turned away. TRACE would show a client what the proxy has put into its
request, the engine's key with it.
"""

from __future__ import annotations

from urllib.parse import unquote

_METHODS = frozenset({"TRACE", "TRACK", "CONNECT"})


def is_forwardable(method: str, path: str) -> bool:
    """Whether a request may go to an engine; ``path`` is as it came, with its percent signs."""
    if method in _METHODS or not path.startswith("/"):
        return False
    if "." not in path and "%" not in path:
        return True
    # Twice, as a gateway may, too.
    plain = unquote(unquote(path)).replace("\\", "/")
    return not any(segment.partition(";")[0] in (".", "..") for segment in plain.split("/"))
