"""Triton's own client finds what it expects of an LLM backend, unchanged but for its address."""

import asyncio
import json
import sys
from pathlib import Path

from tests.cluster.fake_cluster import fake_cluster, run

SCRIPT = Path(__file__).with_name("triton_client.py")


def test_tritonclient_infers_and_streams(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            cluster.worker("d0").step_s = 0.01
            child = await asyncio.create_subprocess_exec(
                sys.executable, str(SCRIPT), cluster.gateway.grpc_address, stdout=asyncio.subprocess.PIPE
            )
            output, _ = await asyncio.wait_for(child.communicate(), 25)
            assert child.returncode == 0
            seen = json.loads(output)

            assert seen["live"] == [True, True]
            assert seen["ready"] == [True, False]
            assert seen["server"] == "baton"
            assert "text_input" in seen["inputs"]
            assert seen["vllm"] == ["7", ("hello" * 6)[: len(seen["vllm"][1])]]
            assert seen["tensorrt"].startswith("hellohello")  # the prompt, and its echo
            assert seen["stream"]["text"].startswith("hello")
            assert seen["stream"]["several"]
            assert "gpt" in seen["stream"]["error"]
            assert seen["error"][0] == "StatusCode.INVALID_ARGUMENT"
            assert "top_p must be in" in seen["error"][1]

    run(scenario())
