#!/usr/bin/env bash
# Install the grammar library that `make bench-grammars` compares llguidance with into a folder of its own; it says where.
set -euo pipefail
python=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin/python
target=${1:-$HOME/.cache/baton/peers/xgrammar}
if [ ! -d "$target/xgrammar" ]; then
  "$python" -m pip install --disable-pip-version-check -q --no-deps --target "$target" xgrammar==0.2.9 apache-tvm-ffi==0.1.15.post2
fi
echo "$target"
