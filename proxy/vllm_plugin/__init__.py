"""A scheduler for vLLM's own ``--scheduler-cls``, which decides inside the engine what a proxy cannot.

``scheduler`` is what to name there; see ``proxy.vllm_plugin.scheduler``.
"""
