"""The two things done with a socket, neither of which waits."""

from __future__ import annotations

import zmq


def can_read(socket: zmq.Socket) -> bool:
    """Whether a frame has arrived, so that `recv` returns at once."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def try_send(socket: zmq.Socket, frame: bytes | bytearray) -> bool:
    """Hand a frame over, unless the socket has as many waiting as it may."""
    try:
        socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
