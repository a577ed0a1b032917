"""Where a store is: the kinds of URLs, and the password in them."""

from __future__ import annotations

from urllib.parse import quote, urlsplit, urlunsplit

_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel")


def check_url(url: str) -> str:
    """Return ``url`` if it is of a kind that ``redis.RedisStore`` takes. What is told of it has no password in it.

    Raises:
        ValueError: it is not.
    """
    try:
        parts = urlsplit(url)
        _ = parts.scheme == "redis+sentinel" or parts.port
    except ValueError:
        raise ValueError("not a URL; one of a Redis server is redis://HOST:PORT") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"not a URL of a Redis server, which begins with {'://, '.join(_SCHEMES)}://")
    if not (parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]):
        raise ValueError(f"{parts.scheme}:// of nothing: unix:///PATH, and else HOST:PORT must follow")
    if parts.scheme == "redis+sentinel" and not parts.path.strip("/"):
        raise ValueError("a sentinel's URL ends with the name of the master: redis+sentinel://HOST:PORT/NAME")
    return url


def has_password(url: str) -> bool:
    """Whether there is a password in the URL of a store."""
    return bool(_user_of(url)[1])


def with_password(url: str, password: str) -> str:
    """Return the URL of a store with a password in it, whatever characters that has."""
    parts = urlsplit(url)
    user, _ = _user_of(url)
    hosts = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{hosts}"))


def _user_of(url: str) -> tuple[str, str]:
    user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
    return user, password
