"""The engine as a process: requests through real sockets, and every way in which a process can be lost."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from revolta_serve.config import EngineConfig, ModelSource, ParallelConfig, ScheduleConfig, ServeConfig
from revolta_serve.engine.client import EngineClient
from revolta_serve.errors import ContextLengthError, EngineUnavailableError, QueueFullError, RequestError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.types import GenerateRequest, SamplingParams
from support import fake_engine
from support.fake_engine import COMMAND, write_model


@pytest.fixture
def config(tmp_path):
    path = write_model(tmp_path)
    built = ServeConfig(
        model=ModelSource(path=str(path)),
        schedule=ScheduleConfig(max_num_seqs=2, max_queue=2),
        engine=EngineConfig(heartbeat_interval=0.05, heartbeat_timeout=1.0, step_timeout=30),
    )
    return built.resolve(ModelConfig.load(path))


@asynccontextmanager
async def engine(config):
    client = EngineClient(config, COMMAND)
    await client.start()
    try:
        await client.ready()
        yield client
    finally:
        await client.close()


def request(id="a", prompt=(1, 2, 3), max_tokens=4):
    return GenerateRequest(id=id, prompt=prompt, max_tokens=max_tokens, sampling=SamplingParams())


async def submit(client, one):
    (stream,) = await client.submit([one])
    return stream


async def collect(stream):
    return [output async for output in stream]


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_requests_share_the_engine_and_finish(config):
    async def scenario():
        async with engine(config) as client:
            assert client.phase == "ready"
            assert client.reports[0].num_blocks > 0
            assert not os.path.exists(client._folder), "no socket file remains while serving"
            streams = await client.submit([request(str(n), (n,), 5) for n in range(4)])
            answers = await asyncio.gather(*(collect(stream) for stream in streams))
            for n, outputs in enumerate(answers):
                assert [t for o in outputs for t in o.tokens] == [n + 1 + i for i in range(5)]
                assert [o.finish for o in outputs][-1] == "length"
            status = client.status()
            assert (status.running, status.waiting, status.blocks_used, status.generated_tokens) == (0, 0, 0, 20)
            return client

    client = asyncio.run(scenario())
    assert client.phase == "dead"


def test_it_works_under_uvloop(config):
    uvloop = pytest.importorskip("uvloop")

    async def scenario():
        async with engine(config) as client:
            outputs = await collect(await submit(client, request()))
            assert len(outputs) == 4
            os.kill(client.pid, signal.SIGKILL)
            assert await client.closed() == -signal.SIGKILL

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_refusals_carry_their_class(config):
    async def scenario():
        async with engine(config) as client:
            with pytest.raises(ContextLengthError, match="maximum context length is 2048"):
                await submit(client, request(prompt=(1,) * 2048))
            first = await submit(client, request("a", (fake_engine.SLOW,), 50))
            with pytest.raises(RequestError, match="already in use"):
                await submit(client, request("a"))
            others = await client.submit([request(str(n), (fake_engine.SLOW,), 50) for n in range(3)])
            with pytest.raises(QueueFullError, match="limit is 2"):
                await submit(client, request("d"))
            for stream in (first, *others):
                await stream.aclose()

    asyncio.run(scenario())


def test_choices_are_admitted_together_or_not_at_all(config):
    async def scenario():
        async with engine(config) as client:
            with pytest.raises(RequestError, match="5 answers are asked for at once, the server never takes more than 4"):
                await client.submit([request(str(n)) for n in range(5)])
            with pytest.raises(ContextLengthError):
                await client.submit([request("a"), request("b", (1,) * 2048)])
            with pytest.raises(RequestError, match="'a' is already in use"):
                await client.submit([request("a"), request("a")])
            assert not client._streams
            assert not client._asked
            streams = await client.submit([request(str(n), (n,), 5) for n in range(4)])
            answers = await asyncio.gather(*(collect(stream) for stream in streams))
            assert [outputs[0].tokens[0] for outputs in answers] == [1, 2, 3, 4], "streams come in the order of the requests"
            assert await client.submit([]) == []

    asyncio.run(scenario())


def test_an_abort_reaches_the_engine_within_steps(config):
    async def scenario():
        async with engine(config) as client:
            stream = await submit(client, request("a", (fake_engine.SLOW,), 500))
            await anext(stream)
            client.abort("a")
            outputs = await collect(stream)
            assert outputs[-1].finish == "abort"
            assert len(outputs) < 20
            client.abort("a")
            client.abort("nobody")
            assert client.status().slots_used == 0
            again = await submit(client, request("a"))
            assert len(await collect(again)) == 4

    asyncio.run(scenario())


def test_a_caller_that_gives_up_while_submitting_leaves_nothing(config):
    async def scenario():
        async with engine(config) as client:
            task = asyncio.create_task(client.submit([request(id, (fake_engine.SLOW,), 500) for id in "ab"]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(100):
                await asyncio.sleep(0.02)
                if not client._streams:
                    break
            assert not client._streams
            assert len(await collect(await submit(client, request("a")))) == 4

    asyncio.run(scenario())


def test_a_fault_in_a_step_is_an_error_for_its_requests_only(config):
    async def scenario():
        async with engine(config) as client:
            outputs = await collect(await submit(client, request(prompt=(fake_engine.RAISE,))))
            assert [o.finish for o in outputs] == ["error"]
            assert "injected fault" in outputs[0].error
            outputs = await collect(await submit(client, request(prompt=(fake_engine.CORRUPT,))))
            assert "not finite" in outputs[0].error
            assert len(await collect(await submit(client, request()))) == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_9_ends_every_request_and_every_process(config, rank):
    async def scenario():
        async with engine(replace(config, parallel=ParallelConfig(tensor=2))) as client:
            pids = [client.pid, *children(client.pid)]
            assert len(pids) == 2
            streams = await client.submit([request(str(n), (fake_engine.SLOW,), 1000) for n in range(3)])
            await anext(streams[0])
            began = time.monotonic()
            os.kill(pids[rank], signal.SIGKILL)
            answers = await asyncio.gather(*(collect(stream) for stream in streams))
            assert time.monotonic() - began < 5
            assert all(outputs[-1].finish == "error" and "dead" in outputs[-1].error for outputs in answers)
            assert await client.closed() != 0
            assert "SIGKILL" in client.reason
            assert ("rank 1" in client.reason) == (rank == 1)
            assert client.phase == "dead"
            with pytest.raises(EngineUnavailableError, match="dead"):
                await submit(client, request("late"))
            wait_for(lambda: not any(running(pid) for pid in pids))

    asyncio.run(scenario())


def test_a_rank_lost_inside_a_collective_does_not_hang_the_engine(config):
    async def scenario():
        async with engine(replace(config, parallel=ParallelConfig(tensor=2))) as client:
            began = time.monotonic()
            outputs = await collect(await submit(client, request(prompt=(fake_engine.RANK_1_DIES,))))
            assert time.monotonic() - began < 5
            assert "rank 1 ended with signal SIGKILL" in outputs[-1].error

    asyncio.run(scenario())


def test_a_collective_that_breaks_before_its_rank_is_missed_does_not_hide_the_reason(config):
    async def scenario():
        async with engine(replace(config, parallel=ParallelConfig(tensor=2))) as client:
            outputs = await collect(await submit(client, request(prompt=(fake_engine.RANK_1_BREAKS,))))
            assert outputs[-1].error == "the engine is dead: rank 1 ended with signal SIGKILL"

    asyncio.run(scenario())


def test_an_engine_that_dies_in_a_step_is_noticed_at_once(config):
    async def scenario():
        async with engine(config) as client:
            began = time.monotonic()
            outputs = await collect(await submit(client, request(prompt=(fake_engine.DIE,))))
            assert time.monotonic() - began < 2
            assert outputs[-1].finish == "error"

    asyncio.run(scenario())


def test_a_stuck_step_counts_as_dead(config, capfd):
    async def scenario():
        stuck = replace(config, engine=replace(config.engine, step_timeout=0.3))
        async with engine(stuck) as client:
            outputs = await collect(await submit(client, request(prompt=(fake_engine.HANG,))))
            assert "a step has taken more than 0.3 s" in outputs[-1].error

    asyncio.run(scenario())
    assert "fake_engine.py" in capfd.readouterr().err, "the stacks are printed"


def test_a_frozen_engine_counts_as_dead(config):
    async def scenario():
        async with engine(config) as client:
            stream = await submit(client, request("a", (fake_engine.SLOW,), 1000))
            os.kill(client.pid, signal.SIGSTOP)
            outputs = await collect(stream)
            assert "no sign of life for 1 s" in outputs[-1].error

    asyncio.run(scenario())


def test_a_drain_lets_requests_finish_and_ends_the_engine(config):
    async def scenario():
        async with engine(config) as client:
            stream = await submit(client, request("a", (fake_engine.SLOW,), 10))
            draining = asyncio.create_task(client.drain(10))
            await asyncio.sleep(0)
            assert client.phase == "draining"
            with pytest.raises(EngineUnavailableError, match="shutting down"):
                await submit(client, request("b"))
            assert [o.finish for o in await collect(stream)][-1] == "length"
            assert await draining == 0
            assert client.reason == "it was shut down"

    asyncio.run(scenario())


def test_sigterm_drains_the_engine_with_the_configured_grace(config):
    async def scenario():
        async with engine(config) as client:
            stream = await submit(client, request("a", (fake_engine.SLOW,), 500))
            await anext(stream)
            os.kill(client.pid, signal.SIGTERM)
            assert (await collect(stream))[-1].finish == "abort"
            assert await client.closed() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        ("other weights", "rank 1 has loaded a checkpoint with fingerprint other, rank 0 one with fake: the files in .* were replaced"),
        ("other pools", r"rank 1 has \(blocks, slots\) \(1, 1\), the plan says"),
    ],
)
def test_ranks_that_differ_do_not_serve(config, tmp_path, load, reason):
    write_model(tmp_path, load)

    async def scenario():
        client = EngineClient(replace(config, parallel=ParallelConfig(tensor=2)), COMMAND)
        await client.start()
        with pytest.raises(EngineUnavailableError, match=reason):
            await client.ready()
        assert await client.closed() == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("load", "reason"), [("refuse", "tensor lm_head.weight of model.safetensors is missing"), ("die", "ended with signal SIGKILL")]
)
def test_a_failed_start_says_why(config, tmp_path, load, reason):
    write_model(tmp_path, load)

    async def scenario():
        client = EngineClient(config, COMMAND)
        await client.start()
        with pytest.raises(EngineUnavailableError, match="still loading"):
            await submit(client, request())
        with pytest.raises(EngineUnavailableError, match=reason):
            await client.ready()
        assert await client.closed() != 0

    asyncio.run(scenario())


def test_a_start_that_takes_too_long_is_given_up(config, tmp_path):
    write_model(tmp_path, "slow")

    async def scenario():
        client = EngineClient(replace(config, engine=replace(config.engine, start_timeout=1.0)), COMMAND)
        await client.start()
        with pytest.raises(EngineUnavailableError, match="no sign of life for 1 s while starting"):
            await client.ready()
        await client.closed()

    asyncio.run(scenario())


API = """
import asyncio, sys
from msgspec import json
from revolta_serve.config import ServeConfig
from revolta_serve.engine.client import EngineClient
async def main():
    client = EngineClient(json.decode(sys.argv[1], type=ServeConfig), sys.argv[2:])
    await client.start()
    await client.ready()
    print(client.pid, flush=True)
    await client.closed()
asyncio.run(main())
"""


def test_the_death_of_the_api_process_ends_everything(config):
    from msgspec import json

    wide = replace(config, parallel=ParallelConfig(tensor=2))
    api = subprocess.Popen([sys.executable, "-c", API, json.encode(wide).decode(), *COMMAND], stdout=subprocess.PIPE)
    pid = int(api.stdout.readline())
    pids = [pid, *children(pid)]
    assert len(pids) == 2
    assert all(running(each) for each in pids)
    api.kill()
    api.wait()
    api.stdout.close()
    wait_for(lambda: not any(running(each) for each in pids))


def test_the_module_explains_itself_when_started_by_hand():
    done = subprocess.run([sys.executable, "-m", "revolta_serve.engine.process"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1
    assert "started by the server" in done.stderr
