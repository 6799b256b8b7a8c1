"""HTTP on a bare socket: what has arrived at a given moment, byte by byte, and connections that close when a test says so."""

import json
import socket
import time
from typing import Any

import httpx


class Wire:
    """One request on a connection of its own. `body` grows as `receive` is called."""

    def __init__(self, url: str, path: str, fields: dict[str, Any]) -> None:
        host, port = url.removeprefix("http://").split(":")
        content = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(head.encode() + content)
        self._raw = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False
        """The last chunk has come, or the connection has been closed."""

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def receive(self, seconds: float) -> bytes:
        """Read what comes within `seconds`; returns the whole body so far."""
        deadline = time.monotonic() + seconds
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                part = self._socket.recv(65536)
            except TimeoutError:
                break
            except ConnectionResetError:
                part = b""
            self._raw += part
            self.ended = not part
            self._parse()
        return self.body

    def receive_until(self, word: bytes, seconds: float = 10.0) -> bytes:
        """Read until the body contains `word`; returns the whole body so far."""
        deadline = time.monotonic() + seconds
        while word not in self.body:
            assert time.monotonic() < deadline, f"{word!r} did not come in {seconds} s but {self.body!r}"
            assert not self.ended, f"the answer ended without {word!r}: {self.status} {self.body!r}"
            self.receive(0.005)
        return self.body

    def finish(self, seconds: float = 10.0) -> bytes:
        """Read to the end; returns the whole body."""
        deadline = time.monotonic() + seconds
        while not self.ended:
            assert time.monotonic() < deadline, f"the answer did not end in {seconds} s: {self.status} {self.body!r}"
            self.receive(0.02)
        return self.body

    def close(self) -> None:
        """Leave, whatever the server is doing."""
        self._socket.close()

    def _parse(self) -> None:
        head, separator, rest = self._raw.partition(b"\r\n\r\n")
        if not separator:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "content-length" in self.headers:
            self.body = rest
            self.ended = self.ended or len(rest) >= int(self.headers["content-length"])
            return
        body = b""
        while b"\r\n" in rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            if len(rest) < length + 2:
                break
            assert rest[length : length + 2] == b"\r\n"
            body, rest = body + rest[:length], rest[length + 2 :]
            self.ended = self.ended or not length
        self.body = body


def payloads(body: bytes) -> list[Any]:
    """The JSON objects of the complete events in a server-sent event stream so far, [DONE] as text; comments are skipped."""
    events = body.decode().split("\n\n")[:-1]
    assert all(event.startswith(("data: ", ": ")) and "\n" not in event for event in events), events
    data = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def get(url: str, path: str) -> httpx.Response:
    """One GET on a connection of its own; certificates, which take long to read, are not looked at."""
    with httpx.Client(verify=False, trust_env=False, timeout=20) as client:
        return client.get(f"{url}{path}")


def post(url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    """One POST on a connection of its own; bytes are sent as they are, anything else as JSON."""
    with httpx.Client(verify=False, trust_env=False, timeout=20) as client:
        if isinstance(body, bytes):
            return client.post(f"{url}{path}", content=body, headers=headers)
        return client.post(f"{url}{path}", json=body, headers=headers)


def metrics(url: str) -> dict[str, float]:
    """Samples of /metrics whose only label is the model's name, by their name without the prefix."""
    samples = {}
    for line in get(url, "/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#") and name.count("=") == 1:
            samples[name.partition("{")[0].removeprefix("revolta:")] = float(value)
    return samples


IDLE = ("num_requests_running", "num_requests_waiting", "kv_blocks_used", "state_slots_used")
"""Gauges that are zero when nobody is served."""


def in_use(url: str) -> dict[str, float]:
    """The gauges of IDLE that are not zero."""
    now = metrics(url)
    return {name: now[name] for name in IDLE if now[name]}


def wait_until_idle(url: str, seconds: float = 2.0) -> None:
    """Wait until no request runs or waits and no block and no slot is used."""
    deadline = time.monotonic() + seconds
    while used := in_use(url):
        assert time.monotonic() < deadline, f"still in use after {seconds} s: {used}"
        time.sleep(0.02)
