"""Messages with file descriptors."""

from __future__ import annotations

import os
import socket

import pytest

from proxyccl.device.memory.descriptors import receive_with_descriptors, send_with_descriptors


def test_flags_are_obeyed_and_descriptors_are_not_inherited() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        with pytest.raises(BlockingIOError):
            receive_with_descriptors(near, 10, 1, socket.MSG_DONTWAIT)
        send_with_descriptors(far, b"one", [near.fileno()])
        data, (descriptor,), _ = receive_with_descriptors(near, 10, 1)
        assert data == b"one"
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
        with pytest.raises(BlockingIOError):
            fill(far)


def fill(connection: socket.socket) -> None:
    for _ in range(100_000):
        send_with_descriptors(connection, bytes(1000), [], socket.MSG_DONTWAIT)
