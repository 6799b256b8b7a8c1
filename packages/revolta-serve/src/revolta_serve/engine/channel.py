"""Channels: one interface to send typed messages, whether the other side is a process or an object in this one.

A message is a msgspec Struct; between processes it travels as MessagePack over ZeroMQ ipc sockets in a private directory, one for each
direction. The receiving side binds, so any number of threads and processes can send to it.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import msgspec
import zmq

from revolta_serve.errors import EngineError

T = TypeVar("T")

LONGEST_PATH = 107
"""Bytes of a Unix socket's path on Linux, without the final zero."""


class Channel(Protocol):
    """Both directions between two parties. Messages arrive in the order sent."""

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; does not wait for it to be read."""

    def receive(self, kind: Any, timeout: float | None = None) -> Any:
        """The next message, which must be a `kind` (a Struct or a union of tagged ones); None after `timeout` seconds, None waits."""

    def close(self) -> None:
        """Drop the channel; what is queued is still delivered if the other side reads within a second."""


@lru_cache(maxsize=64)
def decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    """The cached decoder of a message type."""
    return msgspec.msgpack.Decoder(kind)


class LocalChannel:
    """A queue to an object in this process: messages wait until an answer is asked for, and then the handler answers them in order.

    It runs the handler in the receiver's thread, so rank 0 of the model costs no thread switch and its exceptions surface here.
    """

    def __init__(self, handler: Callable[[Any], msgspec.Struct]) -> None:
        self._handler = handler
        self._queue: deque[msgspec.Struct] = deque()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the handler."""
        self._queue.append(message)

    def receive(self, kind: Any, timeout: float | None = None) -> Any:
        """The handler's answer to the oldest message. Raises EngineError if nothing was sent or the answer is of another kind."""
        if not self._queue:
            if timeout is not None:
                return None
            raise EngineError("in-process channel: an answer is awaited but nothing was sent")
        answer = self._handler(self._queue.popleft())
        if not isinstance(answer, kind):
            raise EngineError(f"in-process channel: the handler answered {type(answer).__name__}, expected {kind}")
        return answer

    def close(self) -> None:
        """Forget what is queued."""
        self._queue.clear()


class Sender:
    """The sending end of one direction. For one thread at a time."""

    def __init__(self, context: "zmq.Context[Any]", path: str) -> None:
        self._path = path
        where = address(path)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        # Writable then means connected, so `wait` can tell that the socket's file is no longer needed.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(where)
        self._connected = False

    def wait(self, seconds: float = 10.0) -> None:
        """Wait until the receiver has accepted the connection. Raises EngineError if it does not in time."""
        if not self._connected and not self._socket.poll(round(seconds * 1000), zmq.POLLOUT):
            raise EngineError(f"nobody receives at {self._path} after {seconds:g} s")
        self._connected = True

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; only the first one waits for the receiver."""
        self.wait()
        # Whoever watches the receiver's process learns of its death in the same instant; what was meant for it is of no use to anyone.
        with contextlib.suppress(zmq.Again):
            self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)

    def close(self, seconds: float = 1.0) -> None:
        """Close; messages still queued have `seconds` to leave."""
        self._socket.close(linger=round(seconds * 1000))


def receiver(context: "zmq.Context[Any]", path: str) -> "zmq.Socket[bytes]":
    """A socket that receives what any number of senders push to `path`."""
    where = address(path)
    socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(where)
    return socket


def address(path: str) -> str:
    """The ipc address of a path. Raises EngineError if the operating system cannot name a socket so."""
    length = len(os.fsencode(path))
    if length > LONGEST_PATH:
        raise EngineError(f"the socket path {path} has {length} bytes, the system allows {LONGEST_PATH}; use a shorter temporary directory")
    return f"ipc://{path}"


class ProcessChannel:
    """Two ipc sockets to another process: what we send goes to `out`, what we receive arrives at `into`. For one thread."""

    def __init__(self, context: "zmq.Context[Any]", *, out: str, into: str) -> None:
        self._in = receiver(context, into)
        self._out = Sender(context, out)

    def wait(self) -> None:
        """Wait until the other process can be sent to. Raises EngineError if it does not appear."""
        self._out.wait()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the other process; only the first one waits for it."""
        self._out.send(message)

    def receive(self, kind: Any, timeout: float | None = None) -> Any:
        """The next message of the other process, or None after `timeout` seconds. Raises EngineError if it is not a `kind`."""
        if timeout is not None and not self._in.poll(round(timeout * 1000)):
            return None
        try:
            return decoder(kind).decode(self._in.recv())
        except msgspec.DecodeError as error:
            raise EngineError(f"a message is not a {kind}: {error}") from error

    def close(self) -> None:
        """Close both sockets."""
        self._in.close()
        self._out.close()
