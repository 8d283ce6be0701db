"""Tickets, announcements, aborts, crashes and reuse in any order: a block only ever holds what its owner put there."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton_pb.v1 import transfer_pb2
from common.config import TransferConfig
from common.errors import BatonError
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore, FakeNetwork

NUM_BLOCKS = 8
NUM_LAYERS = SMALL_LAYOUT.num_layers
LIMIT_S = 60.0
names = st.integers(0, 1)
picks = st.integers(0, 100)


@dataclass(slots=True)
class Transfer:
    """One ticket under way, as the machine knows it."""

    landing: Any
    push: Any
    sender: int
    receiver: int
    sources: list[int]
    targets: list[int]
    expected: list[bytes]
    """What the targets hold when it has landed."""
    announced: set[tuple[int, int]] = field(default_factory=set)
    """(index, layer)."""

    def announce(self, first: int, count: int, layers: range) -> None:
        """Announce what of this rectangle was not announced yet."""
        for index in range(first, min(first + count, len(self.sources))):
            todo = [layer for layer in layers if (index, layer) not in self.announced]
            for layer in todo:
                self.push.announce(index, [self.sources[index]], range(layer, layer + 1))
                self.announced.add((index, layer))

    @property
    def is_complete(self) -> bool:
        return len(self.announced) == len(self.sources) * NUM_LAYERS


class Histories(RuleBasedStateMachine):
    """Two senders, two receivers. Crashed ones come back with a new life under the old name."""

    transport = "fake"

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.seed = 0
        self.sources = [FakeBlockStore(NUM_BLOCKS) for _ in range(2)]
        self.targets = [FakeBlockStore(NUM_BLOCKS) for _ in range(2)]
        for store in self.sources:
            for block in range(NUM_BLOCKS):
                store.fill(block, self.new_seed())
        self.owned = [{block: store.block(block) for block in range(NUM_BLOCKS)} for store in self.targets]
        self.open: list[Transfer] = []
        self.stale: list[transfer_pb2.Ticket] = []
        self.dead: list[Any] = []

        async def begin() -> None:
            self.network = FakeNetwork()
            self.senders = [await self.endpoint(f"sender-{i}", store) for i, store in enumerate(self.sources)]
            self.receivers = [await self.endpoint(f"receiver-{i}", store) for i, store in enumerate(self.targets)]

        self.run(begin())

    @rule(sender=names, receiver=names, count=st.integers(0, 3), pick=picks)
    def begin(self, sender: int, receiver: int, count: int, pick: int) -> None:
        async def step() -> None:
            targets = sorted(self.owned[receiver], key=lambda block: (block * 5 + pick) % NUM_BLOCKS)[:count]
            sources = [(pick + 3 * number) % NUM_BLOCKS for number in range(len(targets))]
            for block in targets:
                del self.owned[receiver][block]
            landing = self.receivers[receiver].grant(targets, 0)
            push = await self.senders[sender].open_push(landing.ticket)
            expected = [self.sources[sender].block(block) for block in sources]
            self.open.append(Transfer(landing, push, sender, receiver, sources, targets, expected))

        self.run(step())

    @precondition(lambda self: self.open)
    @rule(index=picks, first=st.integers(0, 2), count=st.integers(1, 3), layer=st.integers(0, 2), yields=picks)
    def announce(self, index: int, first: int, count: int, layer: int, yields: int) -> None:
        async def step() -> None:
            self.at(index).announce(first, count, range(layer, NUM_LAYERS))
            for _ in range(yields % 5):
                await asyncio.sleep(0)

        self.run(step())

    @precondition(lambda self: self.open)
    @rule(index=picks)
    def finish(self, index: int) -> None:
        async def step() -> None:
            self.network.flow()
            transfer = self.take(index)
            transfer.announce(0, len(transfer.sources), range(NUM_LAYERS))
            await asyncio.gather(transfer.push.finish(), transfer.landing.landed())
            for target, expected in zip(transfer.targets, transfer.expected, strict=True):
                assert self.targets[transfer.receiver].block(target) == expected
            self.reuse(transfer)

        self.run(step())

    @precondition(lambda self: any(not transfer.is_complete for transfer in self.open))
    @rule(index=picks)
    def finish_too_early(self, index: int) -> None:
        async def step() -> None:
            self.network.flow()
            chosen = [number for number, transfer in enumerate(self.open) if not transfer.is_complete]
            transfer = self.open.pop(chosen[index % len(chosen)])
            with pytest.raises(BatonError):
                await transfer.push.finish()
            with pytest.raises(BatonError):
                await transfer.landing.landed()
            await transfer.push.abort("incomplete")
            await transfer.landing.abort("incomplete")
            self.reuse(transfer)

        self.run(step())

    @precondition(lambda self: self.open)
    @rule(index=picks, by_sender=st.booleans(), yields=st.integers(0, 6))
    def abort(self, index: int, by_sender: bool, yields: int) -> None:
        async def step() -> None:
            transfer = self.take(index)
            transfer.announce(0, len(transfer.sources), range(NUM_LAYERS))
            for _ in range(yields):
                await asyncio.sleep(0)
            first, second = (transfer.push, transfer.landing) if by_sender else (transfer.landing, transfer.push)
            await first.abort("the machine says so")
            if by_sender:
                self.rewrite(transfer)
                with pytest.raises(BatonError):
                    await transfer.landing.landed()
            else:
                self.reuse(transfer)
                with pytest.raises(BatonError):
                    await transfer.push.finish()
            await second.abort("the machine says so")
            if by_sender:
                self.reuse(transfer)

        self.run(step())

    @rule(sender=names)
    def crash_sender(self, sender: int) -> None:
        async def step() -> None:
            await self.crash(self.senders[sender])
            for transfer in self.take_all(lambda each: each.sender == sender):
                with pytest.raises(BatonError):
                    await transfer.landing.landed()
                await transfer.landing.abort("its sender crashed")
                await transfer.push.abort("crashed")
                self.reuse(transfer)
            for block in range(NUM_BLOCKS):
                self.sources[sender].fill(block, self.new_seed())
            self.senders[sender] = await self.endpoint(f"sender-{sender}", self.sources[sender])

        self.run(step())

    @rule(receiver=names)
    def crash_receiver(self, receiver: int) -> None:
        async def step() -> None:
            await self.crash(self.receivers[receiver])
            for transfer in self.take_all(lambda each: each.receiver == receiver):
                with pytest.raises(BatonError):
                    await transfer.push.finish()
                await transfer.push.abort("its receiver crashed")
                await transfer.landing.abort("crashed")
                self.reuse(transfer)
            self.receivers[receiver] = await self.endpoint(f"receiver-{receiver}", self.targets[receiver])

        self.run(step())

    @precondition(lambda self: self.stale or self.open)
    @rule(index=picks, sender=names)
    def use_a_ticket_again(self, index: int, sender: int) -> None:
        async def step() -> None:
            used = [*self.stale, *(transfer.landing.ticket for transfer in self.open)]
            with pytest.raises(BatonError):
                await self.senders[sender].open_push(used[index % len(used)])

        self.run(step())

    @rule(receiver=names, sender=names, what=st.sampled_from(["secret", "transfer_id", "generation"]))
    def forge_a_ticket(self, receiver: int, sender: int, what: str) -> None:
        async def step() -> None:
            landing = self.receivers[receiver].grant([], 0)
            forged = transfer_pb2.Ticket()
            forged.CopyFrom(landing.ticket)
            if what == "generation":
                forged.receiver.generation += 1
            else:
                setattr(forged, what, bytes(len(getattr(forged, what))))
            with pytest.raises(BatonError):
                await self.senders[sender].open_push(forged)
            await landing.abort("only forged")

        self.run(step())

    @precondition(lambda self: self.transport == "fake")
    @rule()
    def hold_the_network(self) -> None:
        self.network.hold()

    @rule(sender=names, block=st.integers(0, NUM_BLOCKS - 1))
    def compute_another_source_block(self, sender: int, block: int) -> None:
        if not any(transfer.sender == sender and block in transfer.sources for transfer in self.open):
            self.sources[sender].fill(block, self.new_seed())

    @invariant()
    def blocks_hold_what_their_owner_put_there(self) -> None:
        for store, owned in zip(getattr(self, "targets", []), getattr(self, "owned", []), strict=True):
            for block, content in owned.items():
                assert store.block(block) == content

    def teardown(self) -> None:
        async def end() -> None:
            for endpoint in (*self.senders, *self.receivers):
                await endpoint.close()
            for transfer in self.open:
                await transfer.push.abort("over")
                await transfer.landing.abort("over")
            for endpoint in (*self.senders, *self.receivers, *self.dead):
                assert endpoint.num_active == 0

        if hasattr(self, "runner"):
            self.run(end())
            self.runner.close()

    def run(self, coroutine: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await coroutine

        self.runner.run(limited())

    async def endpoint(self, name: str, store: FakeBlockStore) -> Any:
        if self.transport == "fake":
            return self.network.endpoint(name, store)
        config = TransferConfig.model_validate({"transport": self.transport})
        return await TransferEndpoint.start(name, "127.0.0.1", store, config)

    async def crash(self, endpoint: Any) -> None:
        """End a life: at once for fakes; real processes are killed in test_processes.py, here they close."""
        self.network.flow()
        self.dead.append(endpoint)
        if self.transport == "fake":
            endpoint.kill()
        else:
            await endpoint.close()

    def new_seed(self) -> int:
        self.seed += 1
        return self.seed

    def at(self, index: int) -> Transfer:
        return self.open[index % len(self.open)]

    def take(self, index: int) -> Transfer:
        return self.open.pop(index % len(self.open))

    def take_all(self, is_meant: Any) -> list[Transfer]:
        taken = [transfer for transfer in self.open if is_meant(transfer)]
        self.open = [transfer for transfer in self.open if not is_meant(transfer)]
        return taken

    def rewrite(self, transfer: Transfer) -> None:
        """Compute something else into a push's source blocks, as far as no other push holds them."""
        for block in transfer.sources:
            self.compute_another_source_block(transfer.sender, block)

    def reuse(self, transfer: Transfer) -> None:
        """Give a landing's blocks to somebody else, who writes to them at once."""
        self.stale.append(transfer.landing.ticket)
        store = self.targets[transfer.receiver]
        for block in transfer.targets:
            store.fill(block, self.new_seed())
            self.owned[transfer.receiver][block] = store.block(block)


@pytest.mark.parametrize(("transport", "examples"), [("fake", 80), ("shm", 40), ("ucx", 8), ("tcp", 40)])
def test_any_history_leaves_every_block_to_its_owner(transport: str, examples: int) -> None:
    machine = type("Machine", (Histories,), {"transport": transport})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
