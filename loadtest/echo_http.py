"""An OpenAI-compatible server that answers with made-up tokens: what gateways and routers cost is measured over it.

It knows just enough HTTP/1.1 to stand behind the routers that it is compared with, and writes its events with as little
work as Python allows.
"""

import asyncio
import json
import sys
import time
from typing import Any, Self

_HEADS = {
    True: b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    False: b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n",
}
_INFO = {
    "/v1/models": {"object": "list", "data": [{"id": "echo", "object": "model", "max_model_len": 8192}]},
    "/model_info": {"model_path": "echo", "is_generation": True},
    "/get_model_info": {"model_path": "echo", "is_generation": True},
    "/server_info": {"model_path": "echo", "served_model_name": "echo", "tp_size": 1, "dp_size": 1},
    "/get_server_info": {"model_path": "echo", "served_model_name": "echo", "tp_size": 1, "dp_size": 1},
}
_TOKENS_DEFAULT = 16


class HttpEcho:
    """Answers `max_tokens` times "x ", an event for each, `tpot_s` apart. Owned by one loop; create it with `start`."""

    def __init__(self, tpot_s: float) -> None:
        self.address = ""
        """host:port"""
        self.tpot_s = tpot_s
        self.connections: set[_Connection] = set()
        self.streaming: set[_Connection] = set()
        """Those that have tokens to write."""
        self.begun = asyncio.Event()
        """Set when one of them begins."""
        self._server: asyncio.Server | None = None
        self._stepper: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, tpot_s: float = 0.0) -> Self:
        """Listen on a free port of 127.0.0.1."""
        echo = cls(tpot_s)
        loop = asyncio.get_running_loop()
        echo._server = await loop.create_server(lambda: _Connection(echo), "127.0.0.1", 0, backlog=2048)
        echo.address = f"127.0.0.1:{echo._server.sockets[0].getsockname()[1]}"
        echo._stepper = asyncio.create_task(echo._step())
        return echo

    async def stop(self) -> None:
        """Close everything."""
        assert self._server is not None
        assert self._stepper is not None
        self._stepper.cancel()
        await asyncio.gather(self._stepper, return_exceptions=True)
        self._server.close()
        for connection in list(self.connections):
            connection.cut()

    def set_tpot(self, tpot_s: float) -> None:
        """Change the time between two steps, from now on."""
        assert self._stepper is not None
        self.tpot_s = tpot_s
        self._stepper.cancel()
        self._stepper = asyncio.create_task(self._step())

    async def _step(self) -> None:
        while True:
            if not self.streaming:
                self.begun.clear()
                await self.begun.wait()
            await asyncio.sleep(self.tpot_s)
            for connection in list(self.streaming):
                connection.step()


class _Connection(asyncio.Protocol):
    """One client's requests, one after the other."""

    def __init__(self, echo: HttpEcho) -> None:
        self._echo = echo
        self._received = b""
        self._left = 0
        self._total = 0
        self._is_chat = False
        self._is_writable = True
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport
        self._echo.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """End."""
        self._echo.connections.discard(self)
        self._echo.streaming.discard(self)

    def pause_writing(self) -> None:
        """Skip steps: the client does not read."""
        self._is_writable = False

    def resume_writing(self) -> None:
        """Go on."""
        self._is_writable = True

    def cut(self) -> None:
        """Drop the connection."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Answer a request that is complete."""
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        request, *lines = head.decode("latin-1").split("\r\n")
        if not request.endswith(" HTTP/1.1"):  # a router that tries HTTP/2 first
            self.cut()
            return
        length = next((int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length:")), 0)
        if len(rest) < length:
            return
        self._received = rest[length:]
        path = request.split(" ")[1].partition("?")[0]
        if path.endswith("/completions"):
            self._begin(path, json.loads(rest[:length]))
        else:
            self._reply(_INFO.get(path, {"status": "ok"}))

    def step(self) -> None:
        """Write a token, if one is due and the client reads."""
        if self._is_writable:
            self._write_token()

    def _begin(self, path: str, asked: dict[str, Any]) -> None:
        self._total = asked.get("max_tokens") or asked.get("max_completion_tokens") or _TOKENS_DEFAULT
        self._is_chat = path.endswith("/chat/completions")
        if asked.get("stream"):
            self._left = self._total
            self._echo.streaming.add(self)
            self._echo.begun.set()
            self._transport.write(_HEADS[True])
            self._write_token()
            return
        text = "x " * self._total
        part: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        self._reply(
            {**self._head(), "choices": [{"index": 0, "finish_reason": "length", **part}], "usage": self._usage()}
        )

    def _write_token(self) -> None:
        self._left -= 1
        if not self._left:
            self._echo.streaming.discard(self)
        ending = None if self._left else "length"
        part: dict[str, Any] = {"delta": {"content": "x "}} if self._is_chat else {"text": "x "}
        event = {**self._head(), "choices": [{"index": 0, "logprobs": None, "finish_reason": ending, **part}]}
        data = b"data: %b\n\n" % json.dumps(event).encode()
        if not self._left:
            usage = {**self._head(), "choices": [], "usage": self._usage()}
            data += b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(usage).encode()
        end = b"" if self._left else b"0\r\n\r\n"
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(data), data, end))

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {"id": "echo", "object": kind, "created": int(time.time()), "model": "echo"}

    def _usage(self) -> dict[str, int]:
        return {"prompt_tokens": 1, "completion_tokens": self._total, "total_tokens": 1 + self._total}

    def _reply(self, value: object) -> None:
        body = json.dumps(value).encode()
        self._transport.write(_HEADS[False] + b"content-length: %d\r\n\r\n%b" % (len(body), body))


async def _serve() -> None:
    echo = await HttpEcho.start()
    sys.stdout.write(echo.address + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
