#!/usr/bin/env bash
# Makes an environment in which vLLM's managers and its scheduler run on a CPU: vllm_environment.sh [FOLDER]
# About 2 GB. A plain `pip install vllm` brings CUDA, 10 GB, and nothing that is used here: no compiled operation is.
set -euo pipefail
folder=${1:-vllm-env}

python3.11 -m venv "$folder"
"$folder/bin/pip" install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
"$folder/bin/pip" install numpy psutil pyzmq urllib3 regex msgspec pydantic cbor2 'transformers<5.21.0,>=5.16.1' aiohttp requests \
    oss-harmony openai pillow pybase64 cachetools cloudpickle uvloop py-cpuinfo prometheus_client \
    'fastapi<0.137.0,>=0.133.0' partial-json-parser 'llguidance<1.8.0,>=1.7.0' einops
"$folder/bin/pip" install --no-deps xgrammar==0.2.8 apache-tvm-ffi
"$folder/bin/pip" install --no-deps vllm==0.33.0
