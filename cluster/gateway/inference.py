"""The gRPC face: messages in, messages out; what happens between is in generate.py."""

# ruff: noqa: N802 - the protocol's names

import math
import secrets
from typing import Any

import grpc.aio

from baton_pb.v1 import inference_pb2, inference_pb2_grpc
from cluster.gateway.bugs import bugs_to_errors
from cluster.gateway.chat import check_chat
from cluster.gateway.choices import Piece, choice_ids, choices_of_call, pieces_of
from cluster.gateway.deadline import Deadline
from cluster.gateway.explained import explanation_metadata, wants_explanation
from cluster.gateway.generate import Generator
from cluster.gateway.parsing.interface import CallPiece
from cluster.gateway.permissions import may_use
from cluster.gateway.request import TextPrompt, check_text, check_told
from cluster.gateway.tokenizing import Tokenizing
from cluster.tenants.callers import CALLER
from common.errors import InvalidRequestError
from common.text import Text

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Generate, Tokenize, Detokenize, ListModels. A guard (common/rpc_guard.py) tells clients of what these raise."""

    def __init__(self, generator: Generator, tokenizing: Tokenizing, text: Text, choices_max: int) -> None:
        self._generator = generator
        self._tokenizing = tokenizing
        self._text = text
        self._choices_max = choices_max

    # The stubs know generators only; with `context.write` a cancelled call is seen at once, wherever it waits.
    async def Generate(self, request: inference_pb2.GenerateRequest, context: _Context) -> None:  # type: ignore[override]
        """Stream an answer. A client that leaves, or whose deadline passes, cancels it in every process."""
        request_id = request.request_id or f"req-{secrets.token_hex(8)}"
        timeout_s = min(context.time_remaining() or math.inf, self._generator.request_s)
        generate, most = self._generator.generate, self._choices_max
        with bugs_to_errors(request_id):
            streams = choices_of_call(generate, request, request_id, timeout_s, most)
            async with Deadline(timeout_s), pieces_of(streams) as pieces:
                async for piece in pieces:
                    await context.write(_response(request_id, piece))
                if wants_explanation(context.invocation_metadata()):
                    explanation = await self._generator.explanation(choice_ids(request_id, len(streams)))
                    context.set_trailing_metadata(explanation_metadata(explanation))

    async def Tokenize(
        self,
        request: inference_pb2.TokenizeRequest,
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.TokenizeResponse:
        """Return the ids of a text or a chat."""
        with bugs_to_errors("tokenize"):
            limits = self._generator.limits()
            self._generator.check_model(request.model)
            match request.WhichOneof("prompt"):
                case "text":
                    text = check_text(request.text, limits).text
                    token_ids = await self._tokenizing.token_ids(TextPrompt(text, request.add_special_tokens))
                case "chat":
                    options = request.text_options
                    prompt = check_chat(request.chat, request.tools, request.template_arguments, options, limits)
                    token_ids = await self._tokenizing.token_ids(prompt)
                case None:
                    raise InvalidRequestError("prompt is missing: set text or chat")
            check_told("tokens", token_ids, limits)
            return inference_pb2.TokenizeResponse(
                token_ids=token_ids, tokens=[self._text.token(token_id) for token_id in token_ids]
            )

    async def Detokenize(
        self,
        request: inference_pb2.DetokenizeRequest,
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.DetokenizeResponse:
        """Return the text of ids, special tokens included."""
        with bugs_to_errors("detokenize"):
            limits = self._generator.limits()
            self._generator.check_model(request.model)
            check_told("token_ids", request.token_ids, limits)
            return inference_pb2.DetokenizeResponse(
                text=self._text.decode(request.token_ids, skip_special_tokens=False)
            )

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.ListModelsResponse:
        """Return the one model, if the caller may use it."""
        model = self.model()
        return inference_pb2.ListModelsResponse(models=[model] if may_use(model.id, CALLER.get()) else [])

    def model(self) -> inference_pb2.ModelInfo:
        """Return what is served."""
        limits = self._generator.limits()
        return inference_pb2.ModelInfo(
            id=limits.model_id,
            context_tokens=limits.context_tokens,
            vocab_tokens=limits.vocab_tokens,
            has_chat_template=self._text.has_chat_template,
        )


def _response(request_id: str, piece: Piece) -> inference_pb2.GenerateResponse:
    delta = piece.delta
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs or None,  # a list that is not there costs nothing
        finished=delta.finished,
        choice=piece.index,
        reasoning=delta.reasoning,
        tool_calls=[_piece(piece) for piece in delta.calls] if delta.calls else None,
    )


def _piece(piece: CallPiece) -> inference_pb2.ToolCallPiece:
    return inference_pb2.ToolCallPiece(index=piece.index, id=piece.call_id, name=piece.name, arguments=piece.arguments)
