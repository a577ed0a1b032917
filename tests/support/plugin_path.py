"""What an engine needs to run our scheduler out of this checkout."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCHEDULER = "proxy.vllm_plugin.scheduler.scheduler"
PATH = os.pathsep.join((str(ROOT), str(ROOT / "proxy/vllm_plugin/on_path")))
"""For ``PYTHONPATH``: the project, and by what vLLM finds its logger of statistics."""
