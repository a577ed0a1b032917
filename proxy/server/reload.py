"""Other settings while the proxy runs: read anew by SIGHUP, or when one of their files changes.

All of them are read and checked before any takes effect, and then all do in one turn of the event loop: a request finds
either the old ones or the new ones. What does not hold changes nothing, and ``slai_config_last_reload_successful``
shows it. What cannot change while the proxy runs is named, and stays as it is until a restart.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.configfile import ConfigError
from proxy.server.files import Files, named_files, read_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from proxy.config import Settings
    from proxy.server.notify import Notifier
    from proxy.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0

LIVE = frozenset(
    {
        "engines",
        "aliases",
        "engine_administration",
        "engine_drain_seconds",
        "engine_key_file",
        "engine_tls_ca",
        "engine_tls_cert",
        "engine_tls_key",
        "engine_tls_verify",
        "token_budget",
        "max_num_seqs",
        "kv_tokens",
        "max_wait_seconds",
        "queue_timeout_seconds",
        "max_queue_requests",
        "max_queue_tokens",
        "max_queue_bytes",
        "backlog_factor",
        "kv_watermark",
        "classes",
        "default_class",
        "tenants_from",
        "tenants",
        "keys",
        "keys_file",
        "max_upload_bytes",
        "head_timeout_seconds",
        "body_timeout_seconds",
        "write_timeout_seconds",
        "max_connections",
        "max_connections_per_address",
        "connect_timeout_seconds",
        "idle_timeout_seconds",
        "drain_seconds",
        "drain_grace_seconds",
        "debug_key_file",
        "log_level",
    }
)
"""Settings that can change while the proxy runs."""

FileSignature = tuple[int, int, int]
"""A file's inode, size and time of change."""


@dataclass(frozen=True, slots=True)
class Change:
    """What the settings read anew have otherwise than those in force."""

    settings: Settings
    """To be in force from now on: the new ones as far as they can be."""
    changed: list[str]
    """One line each: the key, what it was and what it is."""
    stays: list[str]
    """Keys that need a restart."""


def compare(old: Settings, new: Settings, *, fixed_engines: bool = False) -> Change:
    """Find what changes. ``fixed_engines``: the engines are simulated ones of our own."""
    live = LIVE - {"engines"} if fixed_engines else LIVE
    names = type(old).model_fields
    different = [name for name in names if getattr(old, name) != getattr(new, name)]
    if fixed_engines:
        different = [name for name in different if name not in ("engines", "state_dir") or getattr(new, name)]
    # One certificate can take another's place, but a listener speaks TLS or does not.
    tls = {"tls_cert", "tls_key"} if old.tls_cert is not None and new.tls_cert is not None else set()
    changed = [name for name in different if name in live | tls]
    values = {name: getattr(new, name) for name in changed}
    told = [f"{name} {_told(name, getattr(old, name), getattr(new, name))}" for name in changed]
    return Change(old.model_copy(update=values), told, [name for name in different if name not in values])


def signature(paths: Iterable[Path]) -> tuple[FileSignature | None, ...]:
    """Return what tells whether files have changed. Links are followed: Kubernetes changes only those."""
    return tuple(map(_signature, paths))


def _signature(path: Path) -> FileSignature | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _told(name: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        parts = (
            ("added", sorted(new.keys() - old.keys())),
            ("removed", sorted(old.keys() - new.keys())),
            ("changed", sorted(key for key in old.keys() & new.keys() if old[key] != new[key])),
        )
        return ", ".join(f"{what} {' '.join(keys)}" for what, keys in parts if keys) or "in another order"
    if name == "engines":
        added, removed = ({*new} - {*old}), ({*old} - {*new})
        return f"added {' '.join(sorted(added)) or 'none'}, removed {' '.join(sorted(removed)) or 'none'}"
    return f"{old} -> {new}"


@dataclass(slots=True)
class Reloader:
    """Watches the files that the settings name, and puts what is in them in force."""

    settings: Settings
    """Those in force."""
    load: Callable[[], Settings]
    apply: Callable[[Settings, Files], None]
    """Puts settings, and what was read from the files that they name, in force."""
    asked: asyncio.Event
    """Set to have all read anew."""
    notifier: Notifier
    fixed_engines: bool = False
    reloads: dict[str, float] = field(default_factory=lambda: {"ok": 0, "failed": 0})
    last_error: str | None = None
    """Why the last one changed nothing, if it did not."""
    _seen: dict[Path, FileSignature | None] = field(default_factory=dict)

    def tell(self, metrics: Metrics) -> None:
        """Show how reloads went."""
        metrics.watch("slai.config.reloads", "Times that the configuration was read anew", self._counts, "result")
        metrics.watch_gauge(
            "slai.config.last_reload_successful",
            "0 if the configuration as it lies there does not hold",
            lambda: self.last_error is None,
        )

    def _counts(self) -> Mapping[str, float]:
        return self.reloads

    async def run(self) -> None:
        """Reload when asked or when a file has changed, until cancelled."""
        self._seen = changing = await self._look()
        while True:
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self.asked.wait()
            except TimeoutError:
                found = await self._look()
                # Whoever writes a file may not be done: it has to look the same twice.
                settled, changing = found == changing, found
                if found == self._seen or not settled:
                    continue
            self.asked.clear()
            before = await self._look()
            await self.reload()
            # What changes while it is read is another change. The files may be others now.
            self._seen = changing = {path: before.get(path, found) for path, found in (await self._look()).items()}

    async def reload(self) -> bool:
        """Read everything anew and put it in force; whether it holds."""
        self.notifier.reloading()
        try:
            new, files = await asyncio.to_thread(self._read)
            change = compare(self.settings, new, fixed_engines=self.fixed_engines)
            self.apply(change.settings, files)
        except (ConfigError, SystemExit) as error:
            self.reloads["failed"] += 1
            self.last_error = str(error)
            _log.error("the settings stay as they are, as the new ones do not hold: %s", error)
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the next ones may hold
            self.reloads["failed"] += 1
            self.last_error = f"a fault of the proxy: {error}"
            _log.exception("reading the settings anew failed through a fault of the proxy")
            return False
        finally:
            self.notifier.ready("the settings were read anew")
        self.settings, self.last_error = change.settings, None
        self.reloads["ok"] += 1
        _log.info(
            "settings read anew: %s",
            "; ".join(change.changed) or "no setting is another, but a file that they name may be",
        )
        if change.stays:
            _log.warning("these take effect only with a restart: %s", ", ".join(change.stays))
        return True

    def _read(self) -> tuple[Settings, Files]:
        new = self.load()
        return new, read_files(new)

    async def _look(self) -> dict[Path, FileSignature | None]:
        paths = named_files(self.settings)
        # A file system that is gone may hold up whoever asks.
        return dict(zip(paths, await asyncio.to_thread(signature, paths), strict=True))
