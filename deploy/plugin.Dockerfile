# syntax=docker/dockerfile:1.7
# vLLM with our scheduler installed (docs/vllm-plugin.md), where a mounted folder is not wanted. From the root of the repository:
#   docker build -f deploy/plugin.Dockerfile -t vllm-slai .
#   docker run --gpus all vllm-slai MODEL --scheduler-cls=proxy.vllm_plugin.scheduler.scheduler
ARG VLLM_TAG=v0.32.0
FROM vllm/vllm-openai:${VLLM_TAG}
COPY pyproject.toml README.md LICENSE /src/
COPY proxy /src/proxy
COPY loadgen /src/loadgen
# It needs nothing that vLLM has not.
RUN python3 -m pip install --no-cache-dir --no-deps /src && rm -r /src
