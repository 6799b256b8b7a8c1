"""Does a token cost the host the same early and late in an answer? CPU time of all but the model, after 1 and after 9,900 tokens.

    engine   scheduler, plan, batch layout, sampler, accounting, and the message to the api; the model is replaced by one that
             says a script
    api      that message read, the answer's events, mailbox, rendering, and the bytes of the response; the network is left out

Two answers are under way at the same time in one process, one at its beginning and one near its end, and go on in turn, a few tokens
each; the ratio is that of their times. Medians over rounds. First every lane must give the same ids, or nothing is timed and the
exit status is 2; it is 1 if a late token costs a tenth more than an early one. Prints, and writes JSON.

    python bench/serve/bench_tokens.py [--rounds 9] [--out results/serve_tokens]

A relative --out is taken from bench/.
"""

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import torch
import uvloop

from harness import ROOT, DifferentAnswersError, machine_line, must_agree, save
from revolta_serve.api.chat import ChatRenderer, read_chat
from revolta_serve.api.completions import CompletionRenderer, read_completion
from revolta_serve.api.context import Api
from revolta_serve.api.engine_port import Phase
from revolta_serve.api.fields import Fields
from revolta_serve.api.generation import Generation
from revolta_serve.api.render import Renderer
from revolta_serve.api.sse import EventStream, WholeAnswer
from revolta_serve.cache.capacity import capacity
from revolta_serve.config import ModelSource, ServeConfig
from revolta_serve.engine.channel import decoder
from revolta_serve.engine.client import Stream
from revolta_serve.engine.core import EngineCore, limits
from revolta_serve.engine.messages import Event, Outputs
from revolta_serve.engine.worker import local
from revolta_serve.metrics import Metrics
from revolta_serve.model.batch import Batch
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.model.pools import Pools, allocate
from revolta_serve.model.rope import Rotary
from revolta_serve.parallel.groups import Group
from revolta_serve.runner.batch import BatchBuilder
from revolta_serve.runner.runner import Runner
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.text.chat_template import ChatTemplate
from revolta_serve.text.defaults import GenerationDefaults
from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.text.tokenizer import Tokenizer
from revolta_serve.types import EngineStatus, FinishReason, GenerateRequest, Output, SamplingParams, StartupReport, TokenLogprobs
from revolta_serve.weights.tiny import make_tiny

EARLY, LATE, TIMED = 1, 9_900, 100
"""Tokens before the timed ones, and how many are timed; the first token of all is a prompt's work."""
TURN = 10
"""Tokens by which the two answers go on in turn."""
LENGTH = LATE + TIMED
PROMPT = tuple(range(5, 69))
LIMIT = 1.1
HOPS = 4
"""Turns of the event loop in which an output becomes bytes: one for the reader of outputs, one for that of events, two to spare."""
TOP = 5
"""Most likely ids beside every token, where logprobs are asked for."""


@dataclass(frozen=True)
class Setup:
    """A checkpoint's small parts, and what is to be said."""

    model: ModelConfig
    config: ServeConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults
    script: tuple[int, ...]

    @classmethod
    def make(cls, directory: Path) -> "Setup":
        """Write a tiny checkpoint and read it. The script has letters only, so that each of its tokens is shown when it comes."""
        make_tiny(directory, layers=4, max_positions=1 << 14)
        model, tokenizer = ModelConfig.load(directory), Tokenizer.load(directory)
        letters = [id for id in range(tokenizer.size) if tokenizer.token_bytes(id).isalpha() and id not in tokenizer.special_ids]
        config = ServeConfig(model=ModelSource(path=str(directory)))
        config = replace(config, schedule=replace(config.schedule, max_num_seqs=1)).resolve(model)
        script = tuple(letters[17 * n * n % len(letters)] for n in range(LENGTH + 1))
        template, defaults = ChatTemplate.load(directory, tokenizer), GenerationDefaults.load(directory, tokenizer.size)
        return cls(model, config, tokenizer, template, defaults, script)


@dataclass(frozen=True)
class Told:
    """What a model pass hands to the runner."""

    mixed: torch.Tensor


class Script:
    """In a model's place: the token that comes after a position is its script's, far above all others."""

    def __init__(self, config: ModelConfig, script: Sequence[int]) -> None:
        self.config, self._script = config, script

    def forward(self, batch: Batch, pools: Pools) -> Told:
        """Rows are their positions."""
        return Told(batch.position)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """f32[R, V]"""
        logits = torch.zeros(len(rows), self.config.vocab)
        for row, position in enumerate(rows.tolist()):
            logits[row, self._script[position + 1 - len(PROMPT)]] = 100.0
        return logits


class EngineLane:
    """Scheduler and runner as in the engine's process, and the messages they cause."""

    def __init__(self, setup: Setup, sampling: dict[str, Any]) -> None:
        model, config = setup.model, setup.config
        planned = capacity(config, model)
        pools = allocate(model, blocks=planned.num_blocks, slots=planned.num_slots, tensor=1, context=1, dtype=torch.float32)
        builder = BatchBuilder(model, Rotary(model, torch.float32), Group(), 1, planned.num_blocks)
        report = StartupReport(
            rank=0, weight_bytes=0, kv_bytes=pools.kv_bytes, state_bytes=pools.state_bytes, num_blocks=planned.num_blocks,
            num_slots=planned.num_slots, load_seconds=0.0, fingerprint="",
        )  # fmt: skip
        double: Any = Script(model, setup.script)
        runner = Runner(double, pools, builder, report)
        # The books are audited every 1,000 steps, which takes as long as the pools are large and falls on some of the timed ones only.
        self._core = EngineCore(Scheduler(limits(config, model, planned)), [local(runner)])
        params = SamplingParams(seed=1, **sampling)
        self._core.submit(GenerateRequest(id="0", prompt=PROMPT, max_tokens=LENGTH + 1, sampling=params))
        self.ids: list[int] = []

    def advance(self, tokens: int) -> None:
        """Produce so many more tokens."""
        end = len(self.ids) + tokens
        while len(self.ids) < end:
            outputs = self._core.step()
            msgspec.msgpack.encode(Outputs(tuple(outputs), self._core.status, self._core.cost))
            for output in outputs:
                self.ids += output.tokens

    def close(self) -> None:
        """Nothing runs by itself."""


class Feed:
    """An engine, as the api sees it, whose tokens come when the benchmark says so."""

    phase: Phase = "ready"

    def __init__(self, length: int) -> None:
        self.max_model_len = length
        self.stream: Stream | None = None

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[AsyncIterator[Output]]:
        """Admit the only request."""
        client: Any = self
        (request,) = requests
        self.stream = Stream(client, request)
        return [self.stream]

    def abort(self, id: str, ended_as: FinishReason = "abort") -> None:
        """Say that the answer has ended, as an engine does."""
        assert self.stream is not None
        self.stream.put(Output(id=id, finish="abort"))

    def status(self) -> EngineStatus:
        """Of no interest here."""
        return EngineStatus()


class ApiLane:
    """A request from its fields to the bytes of its response, which are taken as they come."""

    def __init__(self, setup: Setup, loop: asyncio.AbstractEventLoop, fields: dict[str, Any]) -> None:
        self._loop, self._fed = loop, 0
        self._feed = Feed(setup.config.schedule.max_model_len)
        engine: Any = self._feed
        api = Api(
            setup.config, engine, setup.tokenizer, setup.template, setup.defaults, ThinkTokens(setup.tokenizer),
            Metrics("tiny", self._feed.status, {}, ()),
        )  # fmt: skip
        all_fields = Fields({"max_tokens": LENGTH + 1, "ignore_eos": True, "return_token_ids": True, **fields})
        renderer: Renderer
        if "messages" in fields:
            chat = read_chat(api, all_fields)
            self._generation = Generation(api, "lane", chat.prompts, chat.options, api.think)
            renderer = ChatRenderer(api, "lane", chat)
        else:
            completion = read_completion(api, all_fields)
            self._generation = Generation(api, "lane", completion.prompts, completion.options, None)
            renderer = CompletionRenderer(api, "lane", completion)
        self._app = EventStream(self._generation, renderer, 15.0) if fields["stream"] else WholeAnswer(self._generation, renderer)
        self._parts: list[bytes] = []
        loop.run_until_complete(self._start())
        self._messages = list(messages(self._generation.requests[0], setup.script))

    @property
    def ids(self) -> list[int]:
        """From the bytes of the response."""
        body = b"".join(self._parts)
        texts = [event[6:] for event in body.split(b"\n\n") if event.startswith(b"data: {")] or [body]
        pieces = [json.loads(text) for text in texts]
        if len(texts) > 1 and len(texts) < LENGTH:
            raise RuntimeError(f"{len(texts)} events for {LENGTH} tokens: some went out together, and fewer events cost less")
        return [token for piece in pieces for choice in piece["choices"] for token in choice.get("token_ids", ())]

    def advance(self, tokens: int) -> None:
        """Let so many more tokens come, each after the event of the one before it has gone out."""
        self._loop.run_until_complete(self._take(tokens))

    def close(self) -> None:
        """Give up the rest, as when a client leaves."""
        self._task.cancel()
        self._loop.run_until_complete(self._hop())

    async def _start(self) -> None:
        async def send(message: MutableMapping[str, Any]) -> None:
            self._parts.append(message.get("body", b""))

        async def receive() -> MutableMapping[str, Any]:
            await asyncio.get_running_loop().create_future()  # the client stays
            return {}

        await self._generation.start()
        scope: dict[str, Any] = {"type": "http"}
        self._task: asyncio.Task[None] = asyncio.ensure_future(self._app(scope, receive, send))

    async def _take(self, tokens: int) -> None:
        assert self._feed.stream is not None
        read = decoder(Event).decode
        for message in self._messages[self._fed : self._fed + tokens]:
            self._feed.stream.put(read(message).outputs[0])
            await self._hop()
        self._fed += tokens

    async def _hop(self) -> None:
        for _ in range(HOPS):
            await asyncio.sleep(0)


def messages(request: GenerateRequest, script: Sequence[int]) -> Iterator[bytes]:
    """What the engine sends for a request: the script, token by token."""
    told = request.sampling.logprobs
    for number, token in enumerate(script):
        top = tuple(((token + place) % 900, -0.5 - place) for place in range(max(0, told)))
        output = Output(
            id=request.id,
            tokens=(token,),
            finish="length" if number == LENGTH else None,
            logprobs=(TokenLogprobs(token, -0.5, 1, top),) if told >= 0 else (),
        )
        yield msgspec.msgpack.encode(Outputs((output,), EngineStatus()))


Lane = EngineLane | ApiLane
Makers = dict[str, Callable[[], Lane]]


def lanes(setup: Setup, loop: asyncio.AbstractEventLoop) -> Makers:
    """What is measured, by name."""
    drawn = {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": TOP}
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    completion = {"prompt": list(PROMPT), "temperature": 0, "stop": ["1 is never said", "\n\n"]}
    return {
        "engine, greedy": lambda: EngineLane(setup, {"temperature": 0.0}),
        "engine, penalties and logprobs": lambda: EngineLane(setup, drawn),
        "api, chat stream": lambda: ApiLane(setup, loop, {**chat, "stream": True}),
        "api, chat stream with logprobs": lambda: ApiLane(setup, loop, {**chat, "stream": True, "logprobs": True, "top_logprobs": TOP}),
        "api, completion stream with stop strings": lambda: ApiLane(setup, loop, {**completion, "stream": True}),
        "api, whole chat": lambda: ApiLane(setup, loop, {**chat, "stream": False}),
    }


def said(make: Callable[[], Lane]) -> list[int]:
    """A whole answer."""
    lane = make()
    lane.advance(LENGTH + 1)
    ids = lane.ids
    lane.close()
    return ids


def timed(make: Callable[[], Lane]) -> tuple[float, float]:
    """Microseconds of a token, early and late."""
    pair = (make(), make())
    for lane, before in zip(pair, (EARLY, LATE), strict=True):
        lane.advance(before)
    gc.collect()
    spent = [0.0, 0.0]
    for turn in range(2 * (TIMED // TURN)):
        begun = time.process_time()
        pair[turn % 2].advance(TURN)
        spent[turn % 2] += time.process_time() - begun
    for lane in pair:
        lane.close()
    return spent[0] / TIMED * 1e6, spent[1] / TIMED * 1e6


def main() -> int:
    """Check, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("results/serve_tokens"), help="result file without its suffix")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    with tempfile.TemporaryDirectory() as scratch:
        setup = Setup.make(Path(scratch) / "tiny")
        makers = lanes(setup, loop)
        try:
            must_agree({"script": [setup.script], **{name: [said(make)] for name, make in makers.items()}})
        except DifferentAnswersError as error:
            print(f"bench_tokens: nothing is timed: {error}", file=sys.stderr)
            return 2
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
        for _ in range(arguments.rounds):
            for name, make in makers.items():
                found[name].append(timed(make))
    print(machine_line(1))
    table = {}
    for name, pairs in found.items():
        early, late = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        table[name] = {"early_us": early, "late_us": late, "ratio": ratio}
        print(f"{name:42} {early:7.1f} us a token early, {late:7.1f} us late: {ratio:.3f} (limit {LIMIT:g})")
    result = {
        "rounds": arguments.rounds,
        "before": {"early": EARLY, "late": LATE},
        "timed_tokens": TIMED,
        "limit": LIMIT,
        "cpu_time": table,
    }
    save(ROOT / "bench" / arguments.out.with_suffix(".json"), result)
    return int(any(row["ratio"] > LIMIT for row in table.values()))


if __name__ == "__main__":
    sys.exit(main())
