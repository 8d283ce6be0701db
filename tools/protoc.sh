#!/usr/bin/env bash
# Regenerate baton_pb/ from proto/. With --check, fail if the committed code differs from the generator's.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BATON_VENV:-.venv}/bin
out=.
if [ "${1:-}" = --check ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
"$bin/python" -m grpc_tools.protoc -I proto \
  --plugin=protoc-gen-mypy="$bin/protoc-gen-mypy" --plugin=protoc-gen-mypy_grpc="$bin/protoc-gen-mypy_grpc" \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  $(cd proto && find . -name '*.proto' | sed 's|^\./||' | sort)
if [ "$out" != . ]; then
  diff -r -x __init__.py -x py.typed -x __pycache__ "$out/baton_pb" baton_pb || { echo "baton_pb/ is stale: run make proto" >&2; exit 1; }
fi
