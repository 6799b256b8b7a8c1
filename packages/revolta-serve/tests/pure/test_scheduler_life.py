"""The scheduler's invariants: nothing leaks, nothing starves, nothing is unsafe, whatever arrives and whatever is aborted."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from revolta_serve.errors import ContextLengthError, EngineError, QueueFullError, RequestError
from revolta_serve.model.model_config import GRID
from revolta_serve.scheduler.plan import blocks_for
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.types import GenerateRequest
from support.steps import Worker, answer, empty, limits, request

prompts = st.integers(1, 70) | st.integers(1, 330)
answers = st.integers(1, 40) | st.integers(100, 400)
sources = st.tuples(prompts, answers, st.lists(st.integers(0, 9), max_size=2))


class Life(RuleBasedStateMachine):
    """Requests arrive alone and in batches, run, stall, stop, fail and are aborted in any order."""

    stalls = 0
    """Of all runs together."""

    @initialize(
        seqs=st.integers(1, 4),
        spare=st.integers(0, 120),
        cap=st.integers(1, 3),
        blocks=st.integers(1, 12),
        queue=st.integers(1, 3),
        batch=st.lists(sources, max_size=4),
    )
    def build(self, seqs, spare, cap, blocks, queue, batch):
        self.limits = limits(
            max_num_seqs=seqs, max_num_batched_tokens=GRID + seqs + spare, prefill_cap=cap * GRID, num_blocks=blocks, max_queue=queue,
            num_slots=seqs, max_model_len=320,
        )  # fmt: skip
        self.scheduler, self.worker = Scheduler(self.limits), Worker(self.limits)
        self.sources: dict[str, GenerateRequest] = {}
        self.produced: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.plan = None
        self.count = 0
        if batch:
            self.arrive(batch)

    def take(self, outputs):
        for output in outputs:
            assert output.id not in self.finished, "an output after the last one"
            self.produced[output.id] += output.tokens
            if output.finish:
                self.finished[output.id] = output.finish
                self.check_answer(output)

    def check_answer(self, output):
        source, tokens = self.sources[output.id], self.produced[output.id]
        assert len(tokens) <= source.max_tokens
        if output.finish == "stop":
            assert tokens[-1] == output.stop_token
            assert tokens[-1] in source.stop_token_ids
        if output.finish == "length":
            assert len(tokens) == source.max_tokens or len(source.prompt) + len(tokens) == self.limits.max_model_len
        assert not set(tokens[:-1]) & set(source.stop_token_ids)

    @rule(batch=st.lists(sources, min_size=1, max_size=4))
    def some_arrive(self, batch):
        self.arrive(batch)

    def arrive(self, batch):
        requests = [request(f"r{self.count + n}", *fields) for n, fields in enumerate(batch)]
        self.count += len(requests)
        waiting, seats = self.scheduler.status.waiting, self.limits.max_num_seqs - self.scheduler.status.running
        try:
            self.scheduler.add(requests)
        except QueueFullError:
            assert waiting + len(requests) > self.limits.max_queue + seats
        except ContextLengthError:
            longest = [min(len(each.prompt) + each.max_tokens, self.limits.max_model_len) for each in requests]
            assert any(len(each.prompt) >= self.limits.max_model_len for each in requests) or any(
                blocks_for(tokens - 1) > self.limits.num_blocks for tokens in longest
            )
        except RequestError:
            assert len(requests) > self.limits.max_queue + self.limits.max_num_seqs
        else:
            assert self.scheduler.status.waiting == waiting + len(requests) <= self.limits.max_queue + seats
            for each in requests:
                self.sources[each.id], self.produced[each.id] = each, []
            return
        assert self.scheduler.status.waiting == waiting, "all or none"

    @precondition(lambda self: self.plan is None)
    @rule()
    def plan_a_step(self):
        self.plan = self.scheduler.schedule()
        if self.plan is None:
            assert not self.scheduler.has_work, "work is left but nothing is planned"
            return
        self.worker.follow(self.plan)
        planned = {piece.request for piece in self.plan.slices}
        left_out = [each for each in self.scheduler.running.values() if each.decoding and each.number not in planned]
        assert self.scheduler.status.stalled == len(left_out)
        assert next(iter(self.scheduler.running)) not in {each.number for each in left_out}, "the oldest always goes on"
        Life.stalls += len(left_out)

    @precondition(lambda self: self.plan is not None)
    @rule(token=st.integers(0, 9))
    def finish_the_step(self, token):
        self.take(self.scheduler.update(answer(self.plan, token)))
        self.plan = None

    @precondition(lambda self: self.plan is None)
    @rule(steps=st.integers(1, 100))
    def time_passes(self, steps):
        for _ in range(steps):
            self.plan_a_step()
            if self.plan is None:
                return
            self.the_state_is_safe()
            self.finish_the_step(11)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def one_answer_is_corrupt(self):
        victim = self.plan.slices[0].request
        outputs = self.scheduler.update(answer(self.plan, corrupt={victim}))
        assert victim not in self.scheduler.running
        self.take(outputs)
        self.plan = None

    @precondition(lambda self: self.sources)
    @rule(data=st.data())
    def abort(self, data):
        id = data.draw(st.sampled_from(sorted(self.sources)))
        if self.plan is not None:
            with pytest.raises(EngineError, match="has not been answered"):
                self.scheduler.abort(id)
            return
        output = self.scheduler.abort(id)
        assert (output is None) == (id in self.finished)
        self.take([output] if output else [])

    @precondition(lambda self: self.plan is not None)
    @rule()
    def the_step_fails(self):
        self.take(self.scheduler.fail("worker raised"))
        self.plan = None
        assert empty(self.scheduler)

    @invariant()
    def nothing_leaks(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        running = set(scheduler.running)
        assert {owner for owner, _ in scheduler.blocks.owners()} == running == {owner for owner, _ in scheduler.slots.owners()}
        assert len(running) <= self.limits.max_num_seqs
        status = scheduler.status
        assert status.running + status.waiting == len(self.sources) - len(self.finished)
        assert status.stalled <= status.running

    @invariant()
    def the_state_is_safe(self):
        if not hasattr(self, "scheduler"):
            return
        handed = {owner: len(blocks) for owner, blocks in self.scheduler.blocks.owners()}
        held = {each: max(handed[each.number], blocks_for(each.prompt_length)) for each in self.scheduler.running.values()}
        free = self.limits.num_blocks - sum(held.values())
        assert free == self.scheduler.blocks.num_free >= 0
        for each in sorted(held, key=lambda each: each.number):  # one after the other they could run to their ends
            assert free + held[each] >= blocks_for(each.stored_at_most)
            free += held[each]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.finish_the_step(11)
        self.time_passes(10_000)
        assert self.finished.keys() == self.sources.keys(), "every request finishes"
        assert empty(self.scheduler)


def test_life():
    Life.stalls = 0
    run_state_machine_as_test(Life, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))
    assert Life.stalls, "small pools must have been among them"
