"""A vLLM server as a process of its own."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
from plugin_path import PATH, SCHEDULER

FLAGS = {
    "--served-model-name": "tiny",
    "--max-model-len": "8192",
    "--max-num-seqs": "64",
    "--max-num-batched-tokens": "2048",
    "--block-size": "32",
    "--prefix-caching-hash-algo": "xxhash",
    "--tool-call-parser": "hermes",
    # Weights of chance would write blanks without end.
    "--structured-outputs-config.backend": "xgrammar",
    "--structured-outputs-config.disable_any_whitespace": "true",
}
SWITCHES = ("--enforce-eager", "--enable-prompt-tokens-details", "--enable-auto-tool-choice")
START_SECONDS = 400.0


class RealEngine:
    """Starts, asks, kills and restarts it."""

    def __init__(
        self, venv: Path, model: Path, log: Path, *more: str, plugin: str | None = None, **settings: float
    ) -> None:
        """``more`` flags come after ``FLAGS``; ``plugin``: a policy of ours that it is to schedule by, and settings."""
        self._command = [
            str(venv / "bin" / "python"),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
        ]
        self._log = log
        self._more = list(more)
        self._path = None if plugin is None else PATH
        if plugin is not None:
            told = json.dumps({"slai": {"policy": plugin, **settings}})
            self._more += ["--scheduler-cls", SCHEDULER, "--additional-config", told]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is healthy."""
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        }
        if self._path is not None:
            environment["PYTHONPATH"] = self._path
        command = [*self._command, "--host", "127.0.0.1", "--port", str(self.port), *SWITCHES]
        command += [*(word for pair in FLAGS.items() for word in pair), *self._more]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=self._log.parent
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"vLLM does not start:\n{self._log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def running(self) -> int:
        """How many requests it works on or has waiting, by its own account."""
        return int(self.figure("vllm:num_requests_running") + self.figure("vllm:num_requests_waiting{"))

    async def runs(self, requests: int, seconds: float = 30.0) -> None:
        """Wait until it has so many: it tells nobody, and is asked again and again.

        Raises:
            TimeoutError: it has more or fewer all the time.
        """
        async with asyncio.timeout(seconds):
            while await asyncio.to_thread(self.running) != requests:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def done(self) -> int:
        """How many requests it has ended by itself since its start."""
        return int(self.figure("vllm:request_success_total{"))

    def figure(self, name: str) -> float:
        """The sum of the samples in its metrics that begin so."""
        text = httpx.get(f"{self.url}/metrics", timeout=5.0, trust_env=False).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def alive(self) -> bool:
        """Whether its process has not ended by itself."""
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        """What it has written so far."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """End all of its processes at once, as a crash does."""
        assert self._process is not None
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self.kill()
