"""Making tickets and reading them: the right to write certain blocks of one receiver, once."""

import hashlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from baton_pb.v1 import transfer_pb2
from common.errors import MismatchError, TransferError
from kvtransfer.codecs.registry import AUTO, CODECS, RAW
from kvtransfer.layout import BlockLayout, require_equal

ID_BYTES = 16
SECRET_BYTES = 32
BLOCKS_MAX = 1 << 20


class TicketTerms(NamedTuple):
    """A ticket that was checked against the reader's own layout."""

    transfer_id: bytes
    secret: bytes
    num_blocks: int
    layers: range
    checksum: bool
    sender_lease_s: float
    codec: str
    sealed: bool


def make_ticket(
    address: transfer_pb2.TransferAddress,
    block_ids: Sequence[int],
    first_block: int,
    layout: BlockLayout,
    lease_s: float,
    checksum: bool,
    codec: str = RAW,
    sealed: bool = False,
) -> transfer_pb2.Ticket:
    """Return a ticket with a fresh random id and secret for all layers of `block_ids`.

    The sender's lease is half of the receiver's: it has let go before the receiver reuses anything.
    """
    return transfer_pb2.Ticket(
        transfer_id=secrets.token_bytes(ID_BYTES),
        receiver=address,
        block_ids=block_ids,
        first_block=first_block,
        layer_begin=0,
        layer_end=layout.num_layers,
        layout=layout.to_pb(),
        codec=codec,
        sealed=sealed,
        lease_s=lease_s,
        sender_lease_s=lease_s / 2,
        secret=secrets.token_bytes(SECRET_BYTES),
        checksum=checksum,
    )


def read_ticket(ticket: transfer_pb2.Ticket, layout: BlockLayout) -> TicketTerms:
    """Check a ticket that came from another process.

    Raises:
        MismatchError: another layout, or a codec that this side lacks.
        TransferError: malformed.
    """
    require_equal(layout, BlockLayout.from_pb(ticket.layout))
    if ticket.codec not in (AUTO, *CODECS):
        raise MismatchError(f"the receiver asks for codec {ticket.codec!r}; here are {', '.join(CODECS)}")
    if len(ticket.transfer_id) != ID_BYTES or len(ticket.secret) != SECRET_BYTES:
        raise TransferError("malformed ticket: transfer id or secret has the wrong length")
    if not 0 <= ticket.layer_begin < ticket.layer_end <= layout.num_layers:
        raise TransferError(f"malformed ticket: layers {ticket.layer_begin}..{ticket.layer_end} of {layout.num_layers}")
    if len(ticket.block_ids) > BLOCKS_MAX:
        raise TransferError(f"malformed ticket: {len(ticket.block_ids)} blocks")
    if not 0 < ticket.sender_lease_s < ticket.lease_s:
        raise TransferError(f"malformed ticket: leases {ticket.sender_lease_s} s of {ticket.lease_s} s")
    return TicketTerms(
        transfer_id=ticket.transfer_id,
        secret=ticket.secret,
        num_blocks=len(ticket.block_ids),
        layers=range(ticket.layer_begin, ticket.layer_end),
        checksum=ticket.checksum,
        sender_lease_s=ticket.sender_lease_s,
        codec=ticket.codec,
        sealed=ticket.sealed,
    )


def tag_base(transfer_id: bytes, secret: bytes) -> int:
    """Return the tag of a transfer's first run: 64 bits that nobody without the secret can guess or hit by chance."""
    return int.from_bytes(hashlib.blake2b(transfer_id, digest_size=8, key=secret).digest(), "little")


def run_tag(base: int, num_runs: int) -> int:
    """Return the tag of the run that follows `num_runs` others."""
    return (base + num_runs) % (1 << 64)
