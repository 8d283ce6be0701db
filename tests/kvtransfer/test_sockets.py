"""A socket that a library opened on all addresses can be kept from other hosts, and still be reached from this one."""

import gc
import socket

from kvtransfer.transports import sockets
from tests.kvtransfer.descriptors import num_descriptors


def test_a_listener_on_all_addresses_hears_the_loopback_device_only() -> None:
    with socket.create_server(("", 0)) as door, socket.create_server(("", 0)) as other:
        gc.collect()  # what earlier tests left
        before = num_descriptors()

        assert sockets.keep_to_loopback(door.getsockname()[1])

        assert num_descriptors() == before
        bound = [sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) for sock in (door, other)]
        assert bound == [b"lo\0", b""]
        with socket.create_connection(("127.0.0.1", door.getsockname()[1]), timeout=10):
            pass


def test_a_port_on_which_nobody_listens_is_not_found() -> None:
    with socket.create_server(("", 0)) as door:
        port = door.getsockname()[1]
    assert not sockets.keep_to_loopback(port)
