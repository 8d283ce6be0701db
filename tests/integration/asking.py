"""Ask a gateway and keep all that it says: the client of the integration tests."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
import transformers

from baton_pb.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from common.status import typed_rpc_errors

QUIET_WITHIN_S = 30.0


@dataclass(slots=True)
class Answer:
    """Everything one request got back."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_messages: int = 0
    finished: inference_pb2.Finished | None = None


def greedy(max_tokens: int, **more: Any) -> common_pb2.SamplingParams:
    """Return greedy sampling that ignores end-of-sequence, so that lengths are known."""
    return common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


def request(token_ids: Sequence[int], sampling: common_pb2.SamplingParams) -> inference_pb2.GenerateRequest:
    """Return a request for a prompt of token ids."""
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=token_ids), sampling=sampling)


class Asker:
    """One channel to a gateway, encrypted if an authority's certificate is given; use it in an `async with` block."""

    def __init__(self, address: str, key: str | None = None, ca: bytes | None = None) -> None:
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._channel = (
            grpc.aio.insecure_channel(address)
            if ca is None
            else grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca))
        )
        self.inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self.admin: Any = admin_pb2_grpc.AdminStub(self._channel)

    async def __aenter__(self) -> "Asker":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def ask(
        self,
        message: inference_pb2.GenerateRequest,
        timeout_s: float = 300.0,
        cancel_after_messages: int | None = None,
        into: Answer | None = None,
    ) -> Answer:
        """Send one request and read its stream to the end, or cancel after so many messages.

        Raises:
            BatonError: what the cluster answered; `into` holds what came before.
        """
        answer = Answer() if into is None else into
        call = self.inference.Generate(message, timeout=timeout_s, metadata=self._metadata)
        with typed_rpc_errors():
            async for response in call:
                answer.num_messages += 1
                answer.token_ids.extend(response.token_ids)
                answer.text += response.text
                if response.HasField("finished"):
                    answer.finished = response.finished
                if cancel_after_messages is not None and answer.num_messages >= cancel_after_messages:
                    call.cancel()
                    break
        return answer

    async def ask_all(self, messages: Sequence[inference_pb2.GenerateRequest]) -> list[Answer]:
        """Send all requests at once."""
        return list(await asyncio.gather(*(self.ask(message) for message in messages)))

    async def status(self) -> admin_pb2.ClusterStatus:
        """Return the cluster's status."""
        with typed_rpc_errors():
            status: admin_pb2.ClusterStatus = await self.admin.GetStatus(
                admin_pb2.GetStatusRequest(), timeout=10.0, metadata=self._metadata
            )
        return status

    async def quiet_status(self) -> admin_pb2.ClusterStatus:
        """Return the first status in which nothing is under way; fail with the last one after QUIET_WITHIN_S.

        Load reports are pushed to the router, so the end of a request is seen there a moment later.
        """
        deadline = asyncio.get_running_loop().time() + QUIET_WITHIN_S
        while busy := describe_busy(status := await self.status()):
            assert asyncio.get_running_loop().time() < deadline, f"still busy: {busy}"
            await asyncio.sleep(0.05)
        return status


def describe_busy(status: admin_pb2.ClusterStatus) -> list[str]:
    """Return what keeps the cluster from its baseline, in words."""
    busy = []
    for worker in status.workers:
        load = worker.load
        names = ("blocks_used", "queued_tokens", "waiting_sequences", "running_sequences", "transfers")
        busy += [f"{worker.worker_id}: {name} {value}" for name in names if (value := getattr(load, name))]
        if worker.reservations:
            busy.append(f"{worker.worker_id}: reservations {worker.reservations}")
    if status.router.reservations:
        busy.append(f"router: reservations {status.router.reservations}")
    if status.gateway.running_requests or status.gateway.queued_requests:
        busy.append(f"gateway: running {status.gateway.running_requests}, queued {status.gateway.queued_requests}")
    return busy


class Oracle:
    """`transformers` generate, fp32, greedy, one prompt at a time: what every cluster must reproduce."""

    def __init__(self, model_dir: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.vocab_tokens: int = self._model.config.vocab_size

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the next `num_tokens` tokens; end-of-sequence is ignored."""
        self._model.generation_config.eos_token_id = None
        output = self._model.generate(
            torch.tensor([list(token_ids)]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(token_ids) :].tolist()
        return tokens
