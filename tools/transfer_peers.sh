#!/usr/bin/env bash
# Install what `make bench-transfer` compares with and Baton itself does not need: NIXL and Mooncake, into a folder of
# their own outside .venv, with the system libraries that Mooncake links to. Without it their rows say why they are empty.
set -euo pipefail

python=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python
target=${1:-$HOME/.cache/baton/peers/transfer}
mkdir -p "$target/lib"

"$python" -m pip install --disable-pip-version-check -q --no-deps --upgrade --target "$target" \
  nixl==1.5.1 nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1

# Debian and Ubuntu; elsewhere the libraries are expected to be installed.
if command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
  downloads=$(mktemp -d)
  trap 'rm -rf "$downloads"' EXIT
  (cd "$downloads" && apt-get download -q libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 librdmacm1 >/dev/null)
  for package in "$downloads"/*.deb; do
    dpkg-deb -x "$package" "$downloads/root"
  done
  cp -a "$downloads"/root/usr/lib/*/*.so* "$downloads"/root/lib/*/*.so* "$target/lib/" 2>/dev/null || true
fi
echo "installed in $target"
