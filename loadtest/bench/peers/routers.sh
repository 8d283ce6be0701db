#!/usr/bin/env bash
# Install the routers that `make bench-gateway` compares with into a venv of their own; it says where.
set -euo pipefail
venv=${1:-$HOME/.cache/baton/peers/routers}
if [ ! -x "$venv/bin/vllm-router" ] || [ ! -x "$venv/bin/sglang-router" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --disable-pip-version-check -q "vllm-router==0.1.17" "sglang-router==0.3.2"
fi
echo "$venv"
