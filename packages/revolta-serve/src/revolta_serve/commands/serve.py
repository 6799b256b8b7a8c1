"""serve: check everything that needs no weights, then start the engine and answer HTTP until told to stop.

Exit codes: 0 after a requested stop, 5 when the engine dies while loading, 1 when it dies later. Configuration errors are raised
before anything is loaded.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import asdict, dataclass

import uvicorn
import uvloop
from starlette.applications import Starlette

from revolta_serve.api.app import create_app
from revolta_serve.api.connection import Connection
from revolta_serve.api.operator import Facts
from revolta_serve.api.stats_line import log_stats
from revolta_serve.cache.capacity import Capacity
from revolta_serve.commands import plan_account
from revolta_serve.commands.host_memory import check_memory
from revolta_serve.commands.plan_account import Plan
from revolta_serve.commands.plan_computable import check_computable
from revolta_serve.commands.plan_text import lines
from revolta_serve.config import ApiConfig, ServeConfig, get, options
from revolta_serve.engine.client import COMMAND, EngineClient
from revolta_serve.errors import ConfigError, EngineUnavailableError
from revolta_serve.logs import configure, console
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.profile import Loaded
from revolta_serve.text.chat_template import ChatTemplate
from revolta_serve.text.defaults import GenerationDefaults
from revolta_serve.text.tokenizer import Tokenizer
from revolta_serve.weights.index import CheckpointIndex

log = logging.getLogger(__name__)

DIED_LOADING, DIED_SERVING = 5, 1
FLUSH_SECONDS = 3
"""How long open responses may take to deliver their last event once the engine is gone."""

Guest = Callable[[str, float], Awaitable[None]]
"""Called once with the server's URL and the seconds it took to load; the server stops when it returns."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration that can work with its checkpoint, and everything of the checkpoint but the weights."""

    config: ServeConfig
    plan: Capacity
    account: Plan
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults


def check(config: ServeConfig) -> Checked:
    """Read what needs no weights. Raises ConfigError or CheckpointError."""
    path = config.model.path
    if not os.path.isdir(path):
        raise ConfigError(f"model directory {path!r} does not exist; give the directory that holds config.json")
    model = ModelConfig.load(path)
    check_computable(config, model)
    account = plan_account.account(config, model, index=CheckpointIndex.open(path))
    tokenizer = Tokenizer.load(path)
    template, defaults = ChatTemplate.load(path, tokenizer), GenerationDefaults.load(path, tokenizer.size)
    check_memory(account.config, model, account.capacity)
    return Checked(account.config, account.capacity, account, tokenizer, template, defaults)


WAYS_OUT = {
    errno.EADDRNOTAVAIL: "give an address of this machine with --host, 0.0.0.0 for all",
    errno.EACCES: "choose a port of at least 1024 with --port",
}


def bind(api: ApiConfig) -> socket.socket:
    """Take the port before anything is loaded. Raises ConfigError when it is taken or not ours."""
    try:
        family, _, _, _, address = socket.getaddrinfo(api.host, api.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: no name at all, too long a label or a null character in it
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"api.host={api.host!r} is no address of this machine ({reason}); give one with --host, 0.0.0.0 for all"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        way = WAYS_OUT.get(error.errno or 0, "free it or choose another with --port")
        raise ConfigError(f"cannot listen on {api.host} port {api.port} ({reason}); {way}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """http://host:port of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(loaded: Loaded, guest: Guest | None = None, engine_command: Sequence[str] = COMMAND) -> int:
    """Run the server; returns the exit code. `guest` is for a caller that wants to use it once. Raises ConfigError, CheckpointError.

    engine_command: how the engine process is started; another one than the default is for tests.
    """
    checked = check(loaded.config)
    config = checked.config
    configure(config.api, "api")
    with contextlib.closing(bind(config.api)) as listener:
        for path, shown, source in loaded.table():
            if source != "default":
                log.info("config: %s = %s (%s)", path, shown, source)
        log.info("config: digest %s", config.digest())
        for line in lines(checked.account):
            console.info("%s", line)
        if not config.api.keys and not _is_loopback(config.api.host):
            log.warning("api: anyone who reaches %s may use this server; set --api-key or REVOLTA_API_KEY", config.api.host)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Serving(checked, _facts(loaded, checked), listener, guest, engine_command).run())


def _facts(loaded: Loaded, checked: Checked) -> Facts:
    """Where every value came from: a number that `resolve` found says so, unless it was given."""
    derived = {entry.path: "derived" for entry in options() if get(loaded.config, entry.path) != get(checked.config, entry.path)}
    plan = checked.plan
    sizes = {"tokens": plan.tokens, "kv_bytes": plan.kv_bytes, "state_bytes": plan.state_bytes, "concurrency": round(plan.concurrency, 2)}
    return Facts({**derived, **loaded.sources}, asdict(plan) | sizes)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: its own handling ends the process by the signal, we end by an exit code after a drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Serving:
    """One run of the server: an engine, a listener, and whoever ends them."""

    def __init__(self, checked: Checked, facts: Facts, listener: socket.socket, guest: Guest | None, engine_command: Sequence[str]) -> None:
        self.config, self.listener, self.guest = checked.config, listener, guest
        self.client = EngineClient(checked.config, engine_command)
        app: Starlette = create_app(checked.config, self.client, checked.tokenizer, checked.template, checked.defaults, facts=facts)
        self.server = _Uvicorn(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=self.config.api.log_level == "debug",
                server_header=False,
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        self.stopping: asyncio.Task[None] | None = None
        self.killing: asyncio.Task[None] | None = None
        self.at_once = False
        """A second signal has come: what still runs is given up."""
        self.began = time.monotonic()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        await self.client.start()
        serving = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        console.info("listening on %s while the model loads", url_of(self.listener))
        main = asyncio.create_task(self._live())
        try:
            await asyncio.wait({serving, main}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not main.done():
                serving.result()
            return await main
        finally:
            await self.client.close()
            self.server.should_exit = True
            await serving

    async def _live(self) -> int:
        """From loading to the end of the engine; returns the exit code."""
        try:
            reports = await self.client.ready()
        except EngineUnavailableError as error:
            if self.stopping is not None:
                return 0
            console.error("%s", error.message)
            return DIED_LOADING
        seconds = time.monotonic() - self.began
        weights = sum(report.weight_bytes for report in reports) / (1 << 20)
        names = ", ".join(self.config.served_names)
        loading = max(report.load_seconds for report in reports)
        console.info("ready after %.1f s: %s, %s MiB of weights loaded in %.1f s", seconds, names, f"{weights:,.0f}", loading)
        interval = self.config.api.log_stats_interval
        company = [asyncio.create_task(log_stats(self.client.status, interval))] if interval else []
        company += [asyncio.create_task(self._visit(seconds))] if self.guest is not None else []
        code = await self.client.closed()
        for task in company:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self.stopping is not None and (code == 0 or self.at_once):
            return 0
        console.error("%s; the server ends", self.client.reason)
        return DIED_SERVING

    async def _visit(self, seconds: float) -> None:
        assert self.guest is not None
        try:
            await self.guest(url_of(self.listener), seconds)
        finally:
            if self.stopping is None:
                self._on_signal()

    def _on_signal(self) -> None:
        """First: drain, answering 503 to what is new. Again: end at once."""
        if self.stopping is None:
            log.info("stopping: running requests have %g s", self.config.api.shutdown_timeout)
            self.stopping = asyncio.create_task(self._stop())
        elif not self.at_once:
            log.warning("stopping at once, as a second signal asks: running requests are given up")
            self.at_once = True
            self.client.give_up("the server was told to stop at once")
            self.server.force_exit = True
            self.killing = asyncio.create_task(self._kill())

    async def _stop(self) -> None:
        await self.client.drain(self.config.api.shutdown_timeout)

    async def _kill(self) -> None:
        await self.client.close()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
