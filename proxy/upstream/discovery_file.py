"""Engines in a file: a list of base URLs, in YAML or JSON, read anew when it changes.

The path is opened anew every time, so a file that is replaced, and one behind a symbolic link that is (as Kubernetes
updates a ConfigMap), is noticed like one that is written to.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import yaml

from proxy.upstream.discovery import SourceError, check_base_url

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from proxy.upstream.discovery import Urls

_MOST_BYTES = 1 << 20


class FileSource:
    """The engines that ``path`` lists."""

    def __init__(self, path: Path, interval_seconds: float) -> None:
        self._path = path
        self._interval_seconds = interval_seconds

    async def watch(self) -> AsyncGenerator[Urls]:
        """See ``Source``."""
        content: bytes | None = None
        urls: Urls = frozenset()
        while True:
            found = await asyncio.to_thread(self._read)
            if found != content:
                urls, content = self._parse(found), found
            yield urls
            await asyncio.sleep(self._interval_seconds)

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise SourceError(f"cannot read it: {error.strerror}") from None
        if len(content) > _MOST_BYTES:
            raise SourceError(f"it is longer than {_MOST_BYTES:,} bytes")
        return content

    @staticmethod
    def _parse(content: bytes) -> Urls:
        try:
            value = yaml.safe_load(content)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise SourceError(f"it is neither YAML nor JSON: {' '.join(str(error).split())[:200]}") from None
        if isinstance(value, dict):
            value = value.get("engines")
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(isinstance(url, str) for url in value):
            raise SourceError("it is not a list of base URLs, like [http://gpu1:8001, http://gpu2:8001]")
        try:
            return frozenset(map(check_base_url, value))
        except ValueError as error:
            raise SourceError(str(error)) from None
