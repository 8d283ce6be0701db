"""The command line ends every operating error in one clear line and a non-zero code, and its JSON has all its keys."""

import http.server
import io
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from baton_pb.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc, router_pb2, worker_pb2
from cluster.client import Client
from cluster.commands import show
from common.errors import ConfigError

LIMIT_S = 60.0


def baton(*arguments: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the command line as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        input=text,
        check=False,
    )


class FakeGateway(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    """Answers with the request's own words, in two pieces."""

    def Generate(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        prompt = request.text or " ".join(f"{m.role}:{m.content}" for m in request.chat.messages)
        if prompt == "user:refuse me":
            context.set_trailing_metadata([("retry-after-s", "1.5")])
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "need 4 blocks, 1 available")
        half = len(prompt) // 2
        yield inference_pb2.GenerateResponse(request_id="r1", text=prompt[:half], token_ids=[1, 2])
        yield inference_pb2.GenerateResponse(
            request_id="r1",
            text=prompt[half:],
            token_ids=[3],
            finished=inference_pb2.Finished(
                reason=common_pb2.FINISH_REASON_STOP,
                usage=common_pb2.Usage(prompt_tokens=7, output_tokens=3, cached_tokens=4),
                timing=common_pb2.Timing(ttft_s=0.3, queue_s=0.1, prefill_s=0.2, tpot_s=0.05, total_s=0.4),
                placement=common_pb2.Placement(
                    prefill_worker_id="prefill-0", decode_worker_id="decode-0", transport="shm"
                ),
            ),
        )

    def ListModels(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        return inference_pb2.ListModelsResponse(models=[inference_pb2.ModelInfo(id="tiny")])

    def GetStatus(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        worker = router_pb2.WorkerStatus(
            worker_id="decode-0",
            role=worker_pb2.WORKER_ROLE_DECODE,
            node="here",
            state="ready",
            load=worker_pb2.LoadReport(blocks_free=5, blocks_used=2, blocks_kept=1, queued_tokens=9),
            handshake=worker_pb2.HandshakeReply(backend="reference", slow_paths=["no compiler"]),
        )
        return admin_pb2.ClusterStatus(
            workers=[worker],
            model=inference_pb2.ModelInfo(id="tiny", context_tokens=64),
            uptime_s=3.5,
            transports=["shm"],
            degraded=["no prefill worker can be used: p0 lost"],
        )


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service = FakeGateway()  # type: ignore[abstract]
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    admin_pb2_grpc.add_AdminServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(LIMIT_S)


def test_generate_streams_the_answer_and_says_where_the_time_went(gateway: str) -> None:
    done = baton("generate", "hello there", "--addr", gateway)

    assert (done.returncode, done.stdout) == (0, "user:hello there\n")
    assert "prefill-0 -> decode-0 over shm" in done.stderr
    assert "first token 300 ms = queue 100 + prefill 200" in done.stderr


def test_generate_json_has_every_key(gateway: str) -> None:
    done = baton("generate", "hello", "--system", "be brief", "--addr", gateway, "--json")

    answer = json.loads(done.stdout)
    assert answer["text"] == "system:be brief user:hello"
    assert answer["token_ids"] == [1, 2, 3]
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt": 7, "cached": 4, "output": 3}
    assert answer["timing"].keys() == {"ttft", "queue", "prefill", "transfer_exposed", "first_decode", "tpot", "total"}
    assert answer["placement"]["prefill_worker"] == "prefill-0"
    assert answer["placement"]["decode_worker"] == "decode-0"
    assert answer["placement"]["transport"] == "shm"


def test_raw_sends_the_prompt_as_it_is(gateway: str) -> None:
    assert baton("generate", "once upon", "--raw", "--addr", gateway).stdout == "once upon\n"


def test_chat_sends_the_whole_conversation(gateway: str) -> None:
    done = baton("chat", "--addr", gateway, text="one\ntwo\n")

    assert "user:one assistant:user:one user:two" in done.stdout


def test_status_json_has_every_key(gateway: str) -> None:
    status = json.loads(baton("status", "--addr", gateway, "--json").stdout)

    assert status.keys() == {"workers", "router", "gateway", "degraded", "transports", "model", "uptime"}
    [worker] = status["workers"]
    assert (worker["id"], worker["role"], worker["node"], worker["state"]) == ("decode-0", "decode", "here", "ready")
    assert worker["blocks"] == {"free": 5, "used": 2, "kept": 1}
    assert (worker["backend"], worker["slow_paths"]) == ("reference", ["no compiler"])
    assert (worker["queued_tokens"], worker["running_sequences"]) == (9, 0)
    assert status["degraded"] == ["no prefill worker can be used: p0 lost"]


def test_status_for_people_names_the_workers(gateway: str) -> None:
    shown = baton("status", "--addr", gateway).stdout
    [row] = [line for line in shown.splitlines() if line.startswith("  decode-0")]
    assert row.split()[:5] == ["decode-0", "decode", "here", "reference", "ready"]
    assert "degraded: no prefill worker can be used: p0 lost\n" in shown


def test_a_refusal_keeps_the_clusters_words(gateway: str) -> None:
    done = baton("generate", "refuse me", "--addr", gateway)

    assert (done.returncode, done.stderr) == (1, "baton: need 4 blocks, 1 available\n")


def test_nobody_there_is_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    done = baton("generate", "hello", "--addr", address)

    assert done.returncode == 1
    assert done.stderr == (
        f"baton: nobody listens on {address}: start a cluster with `baton serve`, or name one with --addr\n"
    )


def test_a_port_that_speaks_http_is_told_from_one_where_nobody_listens() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{listening.server_port}"

        done = baton("generate", "hello", "--addr", address)

        listening.shutdown()
    assert done.returncode == 1
    assert done.stderr.startswith(f"baton: what listens on {address} does not speak gRPC")


@pytest.mark.parametrize(
    "address", ["", "here", "here:", "here:http", "here:0", "here:99999", "a b:1", "http://here:1"]
)
def test_an_address_that_is_none_is_refused_in_our_words(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^the gateway's address must be HOST:PORT, e\.g\. 127\.0\.0\.1:50051, "):
        Client(address)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "engine.blok_tokens=16"], "unknown config key engine.blok_tokens"),
        (["--set", "engine.block_tokens=0"], "config key engine.block_tokens"),
        (["--set", "router.policy=best"], "no policy 'best'; there are cost, "),
        (["--set", "engine"], "--set wants a.b=c, got 'engine'"),
        (["-c", "/no/such/cluster.yaml"], "cannot read config file /no/such/cluster.yaml"),
    ],
)
def test_a_wrong_configuration_is_one_line(arguments: list[str], words: str) -> None:
    done = baton("serve", *arguments)

    assert done.returncode == 2
    assert done.stderr.startswith("baton: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hi", "--max-tokens", "99999999999"], "value out of range: 99999999999"),
        (["hi", "--seed", "99999999999999999999999"], "value out of range: 99999999999999999999999"),
        (["a\udcff"], "prompt: "),
        (["--raw", "a\udcff"], "prompt: "),
    ],
)
def test_what_no_message_can_carry_is_one_line(gateway: str, arguments: list[str], words: str) -> None:
    done = baton("generate", "--addr", gateway, *arguments)

    assert done.returncode == 1
    assert done.stderr.startswith("baton: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_busy_port_is_one_line_that_names_the_option() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]

        done = baton("serve", "--set", f"gateway.grpc_port={port}")

    assert done.returncode == 2
    assert done.stderr == (
        f"baton: cannot listen on 127.0.0.1:{port}: address already in use; "
        "choose another with --set gateway.grpc_port=PORT\n"
    )


def test_model_list_of_an_empty_cache_is_an_empty_list(tmp_path: Path) -> None:
    done = baton("model", "list", "--json", "--set", f"model.cache_dir={tmp_path}")

    assert (done.returncode, json.loads(done.stdout)) == (0, [])


def test_model_pull_prints_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert baton("model", "pull", str(tmp_path)).stdout == f"{tmp_path}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["generate", "--help"], ["model", "list"]])
def test_simple_commands_start_without_torch_ray_or_transformers(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from cluster import cli\n"
        f"sys.argv = ['baton', *{arguments!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'ray', 'kvtransfer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)

    assert done.returncode == 0, done.stderr


def test_status_shows_every_pair_of_workers_with_its_rate() -> None:
    stats = worker_pb2.TransferStats(
        peer_worker_id="prefill-0",
        transport="shm",
        bytes=23_600_000,
        pieces=6,
        frames=17,
        exposed_seconds=0.0041,
        probed_bytes_per_s=7.5e9,
        fallbacks=2,
    )
    worker = router_pb2.WorkerStatus(worker_id="decode-0", load=worker_pb2.LoadReport(transfer_stats=[stats]))
    console = Console(width=200, record=True, file=io.StringIO())

    show.print_status(console, show.status_json(admin_pb2.ClusterStatus(workers=[worker])))

    line = next(line for line in console.export_text().splitlines() if "prefill-0" in line)
    assert all(text in line for text in ("decode-0", "shm", "7.50 GB/s", "23.6 MB", "6", "17", "4.1 ms", "2"))


def test_nodes_of_a_ray_whose_token_is_not_shown_says_at_once_what_to_set() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2), interceptors=[_RayWithToken()])
    port = server.add_insecure_port("0.0.0.0:0")  # Ray takes 127.0.0.1 for the host's own address
    server.start()
    try:
        done = baton("nodes", "--address", f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait(LIMIT_S)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"baton: cannot join Ray at 127.0.0.1:{port}: its token is missing or wrong: set RAY_"
    )
    assert done.stderr.count("\n") == 1


class _RayWithToken(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses every call in Ray's words."""

    def intercept_service(self, continuation: object, handler_call_details: object) -> Any:
        def refuse(_: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: Authentication token is missing")

        return grpc.unary_unary_rpc_method_handler(refuse)


def test_nodes_at_an_address_where_nothing_listens_says_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

        done = baton("nodes", "--address", address)

    assert (done.returncode, done.stderr) == (2, f"baton: cannot join Ray at {address}: connection refused\n")
