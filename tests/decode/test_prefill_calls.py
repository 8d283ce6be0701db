"""A prefill worker that hangs is found by its silence to pings; one that is only busy is waited for."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest

from baton_pb.v1 import worker_pb2
from common.errors import WorkerLostError
from decode.prefill_calls import PrefillCalls

LIMIT_S = 15.0

SILENT_SERVER = """
import asyncio
from baton_pb.v1 import worker_pb2_grpc
from engine.rpc_server import RpcServer

class Silent(worker_pb2_grpc.PrefillServicer):
    async def Prefill(self, request, context):
        print("called", flush=True)
        await asyncio.Event().wait()

async def main():
    server = RpcServer.bind("127.0.0.1")
    worker_pb2_grpc.add_PrefillServicer_to_server(Silent(), server.server)
    await server.start()
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_stopped_process_is_lost_in_seconds_and_a_quiet_one_is_not() -> None:
    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SILENT_SERVER, stdout=asyncio.subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}
        )
        assert process.stdout is not None
        calls = PrefillCalls()
        try:
            address = (await asyncio.wait_for(process.stdout.readline(), LIMIT_S)).decode().strip()
            async with calls.open(address, worker_pb2.PrefillRequest(), None) as call:
                answer = asyncio.create_task(call.first_token())
                await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
                quiet, _ = await asyncio.wait([answer], timeout=1.3)  # longer than the time between two pings
                assert not quiet
                os.kill(process.pid, signal.SIGSTOP)
                with pytest.raises(WorkerLostError):
                    await asyncio.wait_for(answer, LIMIT_S)
        finally:
            await calls.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    asyncio.run(main())
