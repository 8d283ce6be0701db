"""`make try-clients`: clients that other people wrote, unchanged, against a cluster with the demo model.

They are installed into venvs of their own, litellm and guidellm into one, aiperf into another: they need hundreds of
packages, and a torch beside ours.
"""

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from cluster.model_store import resolve
from cluster.testing import RunningCluster
from common.config import ModelConfig

CLIENTS = ("litellm==1.110.2", "guidellm==0.8.1", "torch==2.13.0", "transformers==5.24.0")
AIPERF = ("aiperf==0.13.0",)
LIMIT_S = 240
LITELLM = """
import sys
import litellm

base, model = sys.argv[1:]
ask = {
    "model": f"openai/{model}",
    "api_base": base,
    "api_key": "none",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 24,
}
answer = litellm.completion(**ask)
print("whole: ", answer.choices[0].message.content, answer.usage.completion_tokens)
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)]
print("stream:", len(parts), "parts:", "".join(parts))
text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="Once upon a time", max_tokens=8,
                               api_base=base, api_key="none")
print("text:  ", text.choices[0].text)
try:
    litellm.completion(**{**ask, "temperature": -1})
except litellm.BadRequestError as error:
    print("refused:", error)
"""


def main() -> None:
    """Install what is missing, start a cluster and run every client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=Path("~/.cache/baton/peers"), help="where the venvs are")
    peers = parser.parse_args().peers.expanduser()
    clients = installed(peers / "clients", "guidellm", CLIENTS)
    aiperf = installed(peers / "aiperf", "aiperf", AIPERF)
    with RunningCluster() as cluster, cluster.client() as client:
        url, model = f"http://{cluster.addresses['http']}", client.model_id()
        tokenizer = resolve(ModelConfig()).path
        say("litellm")
        run(clients, "python", "-c", LITELLM, f"{url}/v1", model)
        say("guidellm")
        run(clients, "guidellm", *guidellm_arguments(url, model, tokenizer))
        say("aiperf")
        with tempfile.TemporaryDirectory(prefix="baton-aiperf-") as artifacts:
            run(aiperf, "aiperf", *aiperf_arguments(url, model, tokenizer, artifacts))


def installed(folder: Path, program: str, packages: tuple[str, ...]) -> Path:
    """Return a venv that has a program, made if it is not there."""
    if not (folder / "bin" / program).exists():
        venv.create(folder, with_pip=True)
        run(folder, "pip", "install", "--disable-pip-version-check", "-q", *packages)
    return folder


def guidellm_arguments(url: str, model: str, tokenizer: Path) -> list[str]:
    """Return a load of two streams with prompts of 64 tokens and answers of 16."""
    return [
        "run",
        "--disable-progress",
        *("--backend", f"kind=openai_http,target={url},model={model}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=8"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--output", "kind=console"),
    ]


def aiperf_arguments(url: str, model: str, tokenizer: Path, artifacts: str) -> list[str]:
    """Return two streams of chats with 64 tokens in and 16 out."""
    return [
        "profile",
        *("--url", url, "--model", model, "--tokenizer", str(tokenizer)),
        *("--endpoint-type", "chat", "--streaming", "--ui", "simple"),
        *("--request-count", "6", "--concurrency", "2"),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"),
        *("--artifact-dir", artifacts),
    ]


def run(folder: Path, program: str, *arguments: str) -> None:
    """Run a program of the venv; its failure is ours."""
    subprocess.run([str(folder / "bin" / program), *arguments], check=True, timeout=LIMIT_S)


def say(title: str) -> None:
    """Head what follows."""
    sys.stdout.write(f"\n== {title}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
