#!/usr/bin/env bash
# Install the prefix index that `make bench-router` compares with into a venv of its own; it says where.
set -euo pipefail
venv=${1:-$HOME/.cache/baton/peers/dynamo}
if ! "$venv/bin/python" -c 'import dynamo.llm' 2>/dev/null; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --disable-pip-version-check -q "ai-dynamo-runtime==1.6.1"
fi
echo "$venv"
