"""Channels: the same behaviour in a process and between processes, and errors that say what is wrong."""

import shutil
import threading

import msgspec
import pytest
import zmq

from revolta_serve import errors
from revolta_serve.engine.channel import LocalChannel, ProcessChannel, Sender, decoder
from revolta_serve.engine.messages import Abort, Command, Drain, Event, Refused, Submit
from revolta_serve.errors import EngineError
from revolta_serve.types import GenerateRequest, SamplingParams, Slice, StepPlan, StepResult

PLAN = StepPlan(
    step=3,
    slices=(
        Slice(request=1, kind="prefill", slot=0, start=0, tokens=(1, 2), before=(0, 0), blocks=(5,), sampling=SamplingParams(seed=2**62)),
    ),
    forget=(0,),
)


@pytest.fixture
def pair(tmp_path):
    context = zmq.Context()
    ours = ProcessChannel(context, out=str(tmp_path / "a"), into=str(tmp_path / "b"))
    theirs = ProcessChannel(context, out=str(tmp_path / "b"), into=str(tmp_path / "a"))
    yield ours, theirs
    ours.close()
    theirs.close()
    context.term()


def test_messages_arrive_typed_and_in_order(pair):
    ours, theirs = pair
    for step in range(100):
        ours.send(msgspec.structs.replace(PLAN, step=step))
    assert [theirs.receive(StepPlan, 5).step for _ in range(100)] == list(range(100))
    theirs.send(StepResult(step=3, slices=()))
    assert ours.receive(StepResult, 5) == StepResult(step=3, slices=())


def test_a_plan_survives_exactly(pair):
    ours, theirs = pair
    ours.send(PLAN)
    assert theirs.receive(StepPlan, 5) == PLAN


def test_a_union_is_told_apart(pair):
    ours, theirs = pair
    request = GenerateRequest(id="a", prompt=(1,), max_tokens=1, sampling=SamplingParams())
    sent = [Submit(7, (request, request)), Abort("a"), Drain(1.5)]
    for message in sent:
        ours.send(message)
    assert [theirs.receive(Command, 5) for _ in sent] == sent


def test_silence_is_none(pair):
    assert pair[0].receive(StepPlan, 0.01) is None


def test_a_message_of_another_kind_is_an_error(pair):
    ours, theirs = pair
    ours.send(Abort("a"))
    with pytest.raises(EngineError, match="a message is not a"):
        theirs.receive(Event, 5)


def test_the_first_message_waits_for_the_other_side_and_the_files_may_then_go(tmp_path):
    context = zmq.Context()
    early = ProcessChannel(context, out=str(tmp_path / "a"), into=str(tmp_path / "b"))
    thread = threading.Thread(target=early.send, args=[PLAN])
    thread.start()
    late = ProcessChannel(context, out=str(tmp_path / "b"), into=str(tmp_path / "a"))
    thread.join()
    late.wait()
    shutil.rmtree(tmp_path)
    assert late.receive(StepPlan, 5) == PLAN
    late.send(PLAN)
    assert early.receive(StepPlan, 5) == PLAN
    early.close()
    late.send(PLAN)  # to nobody: neither an error nor a wait
    late.close()
    context.term()


def test_a_receiver_that_never_appears_is_named(tmp_path):
    context = zmq.Context()
    sender = Sender(context, str(tmp_path / "nobody"))
    with pytest.raises(EngineError, match=r"nobody receives at .*nobody after 0.05 s"):
        sender.wait(0.05)
    sender.close(0)
    context.term()


def test_a_path_too_long_for_a_socket_is_named(tmp_path):
    context = zmq.Context()
    with pytest.raises(EngineError, match="use a shorter temporary directory"):
        ProcessChannel(context, out="x", into=str(tmp_path / ("d" * 100)))
    context.destroy(linger=0)


def test_a_local_channel_answers_in_the_receivers_thread():
    seen = []

    def handler(plan):
        seen.append(plan.step)
        if plan.step == 2:
            raise RuntimeError("in the handler")
        return StepResult(step=plan.step, slices=())

    channel = LocalChannel(handler)
    channel.send(msgspec.structs.replace(PLAN, step=1))
    channel.send(msgspec.structs.replace(PLAN, step=2))
    assert seen == []
    assert channel.receive(StepResult).step == 1
    with pytest.raises(RuntimeError, match="in the handler"):
        channel.receive(StepResult)
    with pytest.raises(EngineError, match="nothing was sent"):
        channel.receive(StepResult)
    assert channel.receive(StepResult, 0.0) is None
    channel.send(PLAN)
    with pytest.raises(EngineError, match="answered StepResult, expected"):
        channel.receive(StepPlan)


def test_every_error_of_the_tree_crosses_with_its_status():
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.RevoltaError):
            crossed = decoder(Event).decode(msgspec.msgpack.encode(Refused.of(3, kind("why"))))
            again = crossed.exception()
            assert (type(again), again.message, again.status) == (kind, "why", kind.status)
    assert type(Refused("a", "Struct", "why").exception()) is EngineError
