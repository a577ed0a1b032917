"""The simulated engine behind vLLM's HTTP API: what a proxy cannot tell from the real server, minus the GPU.

``server``
    The engine on the event loop's clock: one task takes its steps, tokens go straight to their streams.
``bodies``
    Requests: what the engine needs from a body, and vLLM's refusals.
``prompts``
    Token ids of prompts, and the blocks of them that the prefix cache finds.
``answers``
    Bytes of the answers: server-sent events token by token, and whole bodies.
``metrics``
    ``/metrics`` with vLLM's names and labels.
``app``
    The aiohttp application, and starting several engines in one process.

What it leaves out: sampling, stop strings, tools, logprobs, several prompts or choices per request.
Every answer has exactly ``max_tokens`` tokens (as with ``ignore_eos``) and ends with ``finish_reason: "length"``.
"""

from proxy.sim.http.app import SERVER, RunningEngine, create_app, serve, start_engines, stop_engines
from proxy.sim.http.server import SimulatedServer

__all__ = ["SERVER", "RunningEngine", "SimulatedServer", "create_app", "serve", "start_engines", "stop_engines"]
