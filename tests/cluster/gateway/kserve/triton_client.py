"""What a user of Triton writes; prints what it saw as JSON.

Run by test_tritonclient.py as a process: `tritonclient` brings the protocol's messages, and a process takes them once.
"""

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton

MODEL = "fake"


def tensor(name: str, value: Any, datatype: str) -> triton.InferInput:
    """Return an input of one value."""
    made = triton.InferInput(name, [1], datatype)
    kind = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32}[datatype]
    made.set_data_from_numpy(np.array([value], dtype=kind))
    return made


def main(address: str) -> dict[str, Any]:
    """Ask in every way."""
    seen: dict[str, Any] = {}
    with triton.InferenceServerClient(address) as client:
        seen["live"] = [client.is_server_live(), client.is_server_ready()]
        seen["ready"] = [client.is_model_ready(MODEL), client.is_model_ready("gpt")]
        seen["server"] = client.get_server_metadata(as_json=True)["name"]
        seen["inputs"] = [one["name"] for one in client.get_model_metadata(MODEL, as_json=True)["inputs"]]
        params = tensor("sampling_parameters", json.dumps({"temperature": "0.1", "max_tokens": 6}).encode(), "BYTES")
        inputs = [tensor("text_input", b"hello", "BYTES"), params, tensor("exclude_input_in_output", True, "BOOL")]
        answer = client.infer(MODEL, inputs, request_id="7")
        seen["vllm"] = [answer.get_response().id, answer.as_numpy("text_output")[0].decode()]
        inputs = [
            tensor("text_input", b"hello", "BYTES"),
            tensor("max_tokens", 4, "INT32"),
            tensor("temperature", 0.5, "FP32"),
        ]
        seen["tensorrt"] = client.infer(MODEL, inputs).as_numpy("text_output")[0].decode()
        seen["stream"] = stream(client)
        try:
            client.infer(MODEL, [tensor("text_input", b"hello", "BYTES"), tensor("top_p", 7.0, "FP32")])
        except triton.InferenceServerException as error:
            seen["error"] = [error.status(), error.message()]
    return seen


def stream(client: triton.InferenceServerClient) -> dict[str, Any]:
    """Send two requests on one stream, one of them wrong."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    inputs = [tensor("text_input", b"hello", "BYTES"), tensor("stream", True, "BOOL")]
    client.async_stream_infer(MODEL, inputs, request_id="a", parameters={"max_tokens": 8})
    texts: list[str] = []
    is_final = False
    while not is_final:
        result, error = answers.get(timeout=20)
        assert error is None
        texts.append(result.as_numpy("text_output")[0].decode())
        is_final = result.get_response().parameters["triton_final_response"].bool_param
    client.async_stream_infer("gpt", inputs, request_id="b")
    _, error = answers.get(timeout=20)
    client.stop_stream()
    return {"text": "".join(texts), "several": len(texts) > 1, "error": error.message()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])))
