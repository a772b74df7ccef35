# CPU:  docker build -t rlhf .
# GPU:  docker build -t rlhf:cuda --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --build-arg TORCH_INDEX= .
# Run:  docker run --rm -v "$PWD:/work" rlhf train configs/ppo.yaml …        (with GPUs: --gpus all --ipc=host)
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Where torch comes from. Empty: the package index, whose torch for Linux is the CUDA build.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Extras of pyproject.toml, separated by spaces, e.g. "deepspeed track".
ARG EXTRAS=""

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# A CUDA base has no Python; pkill (procps) is what the scripts of `rlhf launch` stop a run with.
RUN apt-get update \
    && apt-get install -y --no-install-recommends procps \
    && if ! command -v python3 >/dev/null; then apt-get install -y --no-install-recommends python3 python3-venv; fi \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rlhf

# torch first, in a layer of its own: it is large and changes rarely.
COPY constraints.txt ./
RUN python3 -m venv .venv \
    && .venv/bin/python -m pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"

COPY pyproject.toml README.md LICENSE ./
COPY scripts scripts
COPY configs configs
COPY reward_model reward_model
COPY rlhf rlhf
RUN bash scripts/setup.sh ${EXTRAS}

ENV PATH=/opt/rlhf/.venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["rlhf"]
CMD ["--help"]
