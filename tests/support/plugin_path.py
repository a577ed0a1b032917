"""This project as a vLLM's environment finds it when it is installed there, without installing it there."""

import os
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCHEDULER = "proxy.vllm_plugin.scheduler.scheduler"


def plugin_path(directory: Path) -> str:
    """Return a ``PYTHONPATH`` with the project and its entry points; what these are is put into ``directory``."""
    installed = distribution("slai-proxy")
    told = directory / f"slai_proxy-{installed.version}.dist-info"
    told.mkdir(parents=True, exist_ok=True)
    for name in ("METADATA", "entry_points.txt"):
        (told / name).write_text(installed.read_text(name) or "", encoding="utf-8")
    return os.pathsep.join((str(directory), str(ROOT)))
