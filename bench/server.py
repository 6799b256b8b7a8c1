"""A server in its own process for benchmarks over HTTP."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


@contextmanager
def running_server(directory: Path, *, threads: int = 1, timeout: float = 60.0) -> Iterator[str]:
    """Serve `directory` on a free loopback port; yields the base URL once it is ready, stops it afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "revolta_serve", "serve", str(directory), "--port", str(port), "--threads", str(threads)]
    process = subprocess.Popen([*command, "--log-level", "warning"])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + timeout
        while not _ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server was not ready after {timeout} s")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=1).status_code == 200
    except httpx.TransportError:
        return False
