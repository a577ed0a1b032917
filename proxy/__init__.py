"""slai-proxy: a scheduling reverse proxy for LLM inference.

A map for newcomers, from the inside out:

``core``
    Every decision, pure: events and the time go in, actions come out. No I/O, no clock.
``wire``
    Bytes to values and back: server-sent events, views of the OpenAI API, error answers, headers.
``upstream``
    The live side of an engine: the HTTP client, health probes, the scrape of its metrics.
``telemetry``
    Every metric, span attribute and log line, by name; the decision log and its replay.
``server``
    The live side of clients: the aiohttp application and the driver that feeds the core.
``sim``
    A model of vLLM with two faces: a discrete-event simulator that drives the same core, and an HTTP server.
``vllm_plugin``
    A scheduler that vLLM itself loads: decisions of ``core`` inside an engine.
``cli``, ``config``, ``flags``, ``mistakes``
    Commands; the one tree of settings, its flags, and what is told of settings that are wrong.

Imports point one way: cli -> server -> upstream | telemetry | sim | vllm_plugin -> wire -> core.
"""

__version__ = "0.1.0"
