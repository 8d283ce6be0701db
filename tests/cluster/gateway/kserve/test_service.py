"""The Open Inference Protocol over our own stubs: tensors in both encodings, streams side by side, refusals by name."""

import struct
from pathlib import Path
from typing import Any

import pytest

from baton_pb.kserve import inference_pb2, inference_pb2_grpc
from common.errors import InvalidRequestError, NotFoundError, OverloadedError
from common.status import typed_rpc_errors
from common.text import Text
from tests.cluster.fake_cluster import LIMIT_S, FakeCluster, fake_cluster, run, until

Request = inference_pb2.ModelInferRequest


def asked(text: str = "hello", **parameters: Any) -> Request:
    """Return a request with contents that are not raw."""
    made = Request(model_name="fake", id="my id")
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(made.parameters[name], kind, value)
    return made


def stub_of(cluster: FakeCluster) -> Any:
    return inference_pb2_grpc.GRPCInferenceServiceStub(cluster.channel)


def values(answer: inference_pb2.ModelInferResponse, name: str) -> list[Any]:
    [output] = [one for one in answer.outputs if one.name == name]
    contents = output.contents
    found = [*contents.bytes_contents, *contents.uint_contents]
    assert list(output.shape) == [len(found)]
    return [one.decode() if isinstance(one, bytes) else one for one in found]


def test_all_outputs_of_several_choices(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            wanted: dict[str, Any] = dict.fromkeys(
                ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True
            )
            answer = await stub_of(cluster).ModelInfer(
                asked(max_tokens=5, n=2, seed=8, exclude_input_in_output=True, **wanted), timeout=LIMIT_S
            )

            num_prompt = len(Text.load(model_dir).encode("hello"))
            assert (answer.id, answer.model_name) == ("my id", "fake")
            assert len(set(values(answer, "text_output"))) == 1
            assert values(answer, "finish_reason") == ["length", "length"]
            assert values(answer, "num_input_tokens") == [num_prompt]
            assert values(answer, "num_output_tokens") == [5, 5]
            assert sorted(start.sampling.seed for start in cluster.worker("d0").started) == [8, 9]

    run(scenario())


def test_raw_contents_are_answered_with_raw_contents(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            made = Request(model_name="fake")
            made.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
            made.inputs.add(name="max_tokens", datatype="UINT8", shape=[1])
            made.inputs.add(name="stop_words", datatype="BYTES", shape=[2])
            made.raw_input_contents.extend(
                [struct.pack("<I", 5) + b"hello", b"\x07", b"".join(struct.pack("<I", 2) + w for w in (b"zz", b"yy"))]
            )

            answer = await stub_of(cluster).ModelInfer(made, timeout=LIMIT_S)

            [raw] = answer.raw_output_contents
            assert struct.unpack("<I", raw[:4])[0] == len(raw) - 4
            assert raw[4:].startswith(b"hellohello")
            assert cluster.worker("d0").started[0].sampling.max_tokens == 7

    run(scenario())


def test_requests_of_one_stream_run_side_by_side_and_one_that_fails_harms_no_other(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            worker = cluster.worker("d0")
            worker.step_s = 0.01
            call = stub_of(cluster).ModelStreamInfer(timeout=LIMIT_S)
            for request_id in ("a", "b"):
                made = asked(stream=True, max_tokens=20, triton_enable_empty_final_response=True)
                made.id = request_id
                await call.write(made)
            await until(lambda: worker.num_running == 2, "not side by side")
            await call.write(asked(stream=True, temperature=-3.0))
            await call.done_writing()
            answers = [answer async for answer in call]

            failed = [answer for answer in answers if answer.error_message]
            assert [answer.infer_response.id for answer in failed] == ["my id"]
            assert "temperature must be in" in failed[0].error_message
            for request_id in ("a", "b"):
                parts = [one.infer_response for one in answers if one.infer_response.id == request_id]
                finals = [part.parameters["triton_final_response"].bool_param for part in parts]
                assert finals == [*[False] * (len(parts) - 1), True]
                assert len(parts[-1].outputs) == 0
                assert "".join(values(part, "text_output")[0] for part in parts[:-1]).startswith("hellohello")

    run(scenario())


def test_leaving_frees_everything(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            worker = cluster.worker("d0")
            worker.step_s = 0.02
            call = stub_of(cluster).ModelStreamInfer()
            await call.write(asked(stream=True, max_tokens=400))
            await call.read()

            call.cancel()

            await until(lambda: worker.num_running == 0, "not cancelled")

    run(scenario())


def with_json(text: bytes) -> Request:
    made = asked()
    made.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text)
    return made


def test_what_vllm_says_of_text_among_its_sampling_parameters_is_understood(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            text = b'{"max_tokens": 9, "stop": "o", "include_stop_str_in_output": true, "truncate_prompt_tokens": 1}'
            message = with_json(text)
            message.parameters["exclude_input_in_output"].bool_param = True
            answer = await stub_of(cluster).ModelInfer(message)

            assert len(cluster.worker("d0").started[0].token_ids) == 1
            assert values(answer, "text_output")[0].endswith("o")

    run(scenario())


def broken(change: str) -> Request:
    made = asked()
    exec(change, {"made": made})
    return made


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Request(model_name="fake"), "text_input is missing"),
        (asked(stream=True), "stream must be false in ModelInfer"),
        (asked(max_tokens=0), "max_tokens must be at least 1"),
        (asked(max_tokens=-1), "max_tokens is out of range"),
        (asked(max_tokens="many"), "max_tokens must be an integer"),
        (asked(max_tokens=10**6), "max_tokens must be at most"),
        (asked(tempurature=1.0), "tempurature is nothing that this model takes"),
        (asked(n=17), "n must be at most 16"),
        (asked(n=2**32 - 1), "n must be at most 16"),
        (asked(stop_words=3), "stop must be text"),
        (asked(exclude_input_in_output=7), "exclude_input_in_output must be true or false"),
        (asked(sampling_parameters="x"), "sampling_parameters is nothing"),
        (asked(seed=1, random_seed=2), "seed is given twice"),
        (with_json(b"{"), "sampling_parameters is not JSON"),
        (with_json(b"[1]"), "sampling_parameters must be a JSON object, got list"),
        (with_json(b"[" * 100_000), "sampling_parameters is not JSON"),
        (with_json(b'{"stop": ["\\ud800"]}'), "sampling_parameters is not JSON"),
        (with_json(b'{"top_p": 1' + b"0" * 5000 + b"}"), "sampling_parameters is not JSON"),
        (broken("made.inputs[0].datatype = 'FP8'"), r"inputs\[0\].datatype must be one of"),
        (broken("made.inputs[0].shape[0] = 2"), r"inputs\[0\] must have 2 values as its shape says, got 1"),
        (broken("made.inputs[0].shape[0] = 10**12"), r"inputs\[0\].shape must be of at most 1024"),
        (broken("made.inputs[0].shape[0] = -1"), r"inputs\[0\].shape must be"),
        (broken("made.inputs.append(made.inputs[0])"), r"inputs\[1\].name is 'text_input', as that of another"),
        (broken("made.raw_input_contents.append(b'\\x09\\0\\0\\0hi')"), r"raw_input_contents\[0\] is cut short"),
        (broken("made.raw_input_contents.extend([b'', b''])"), "raw_input_contents must be one for each of 1"),
        (broken("made.inputs[0].contents.bytes_contents[0] = b'\\xff'"), r"inputs\[0\] must be UTF-8"),
        (broken("made.outputs.add(name='x')"), r"outputs\[0\].name must be one of"),
        (
            broken("made.inputs[0].parameters['shared_memory_region'].string_param = 'x'"),
            "there is no shared memory here",
        ),
    ],
)
def test_what_is_wrong_is_named(model_dir: Path, message: Request, words: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            with pytest.raises(InvalidRequestError, match=words), typed_rpc_errors():
                await stub_of(cluster).ModelInfer(message, timeout=LIMIT_S)

    run(scenario())


def test_errors_keep_their_codes(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, retries_max=0) as cluster:
            message = asked()
            message.model_name = "gpt"
            with pytest.raises(NotFoundError), typed_rpc_errors():
                await stub_of(cluster).ModelInfer(message, timeout=LIMIT_S)
            with pytest.raises(NotFoundError), typed_rpc_errors():
                await stub_of(cluster).ModelMetadata(inference_pb2.ModelMetadataRequest(name="gpt"))
            cluster.worker("d0").refuse(OverloadedError("full", 2.0))
            with pytest.raises(OverloadedError) as caught, typed_rpc_errors():
                await stub_of(cluster).ModelInfer(asked(), timeout=LIMIT_S)
            assert caught.value.retry_after_s == 2.0

    run(scenario())


def test_bytes_that_are_no_message_end_the_stream_as_invalid(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            call: Any = cluster.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)
            with pytest.raises(InvalidRequestError, match="no valid message"), typed_rpc_errors():
                async for _ in call(iter([b"\xff\xff"]), timeout=LIMIT_S):
                    pass

    run(scenario())
