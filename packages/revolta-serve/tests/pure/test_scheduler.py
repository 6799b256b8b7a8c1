"""The scheduler: nothing leaks, nothing starves, every slice is on the grid, whatever arrives and whatever is aborted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from revolta_serve.errors import ContextLengthError, EngineError, QueueFullError, RequestError
from revolta_serve.model.model_config import GRID
from revolta_serve.scheduler.plan import before, blocks_for, prefill_rows
from revolta_serve.scheduler.scheduler import Limits, Scheduler
from revolta_serve.types import GenerateRequest, SamplingParams, SliceResult, StepPlan, StepResult

MARK = 999


def limits(**changes):
    values = {
        "max_num_seqs": 3, "max_num_batched_tokens": 200, "prefill_cap": 64, "max_model_len": 600, "max_queue": 4, "num_blocks": 14,
        "num_slots": 6, "history": 2, "mark": MARK,
    }  # fmt: skip
    return Limits(**values | changes)


def request(id="a", prompt=5, max_tokens=4, stop=()):
    return GenerateRequest(
        id=id, prompt=tuple(range(prompt)), max_tokens=max_tokens, sampling=SamplingParams(seed=prompt), stop_token_ids=tuple(stop)
    )


def answer(plan: StepPlan, token=7, corrupt=()):
    """What a worker would say: `token` wherever the plan asks for one."""
    return StepResult(
        step=plan.step,
        slices=tuple(
            SliceResult(piece.request, (token,) if piece.sample and piece.request not in corrupt else (), piece.request in corrupt)
            for piece in plan.slices
        ),
    )


def run(scheduler, token=7, steps=1000):
    outputs = []
    for _ in range(steps):
        plan = scheduler.schedule()
        if plan is None:
            return outputs
        outputs += scheduler.update(answer(plan, token))
    raise AssertionError("the scheduler does not come to rest")


def empty(scheduler):
    return scheduler.blocks.num_free == scheduler.limits.num_blocks and scheduler.slots.num_owned == 0 and not scheduler.has_work


class Worker:
    """Follows plans as a worker does and checks that each could be carried out."""

    def __init__(self, limits):
        self.limits = limits
        self.known: dict[int, dict] = {}

    def follow(self, plan):
        for number in plan.forget:
            self.known.pop(number, None)
        kinds = [piece.kind for piece in plan.slices]
        assert kinds == sorted(kinds), "decode rows come first"
        rows = sum(len(piece.tokens) for piece in plan.slices)
        prompts = sum(len(piece.tokens) for piece in plan.slices if piece.kind == "prefill")
        assert 0 < rows <= self.limits.max_num_batched_tokens
        assert len({piece.request for piece in plan.slices}) == len(plan.slices) <= self.limits.max_num_seqs
        if "decode" in kinds:
            assert prompts <= self.limits.prefill_cap
        for piece in plan.slices:
            if piece.fresh:
                assert piece.request not in self.known
                assert piece.sampling is not None
                assert piece.start == 0
                self.known[piece.request] = {"tokens": [], "blocks": [], "slot": piece.slot}
            mine = self.known[piece.request]
            assert piece.fresh or piece.sampling is None
            assert piece.start == len(mine["tokens"])
            assert piece.slot == mine["slot"]
            assert piece.before == before(mine["tokens"], piece.start, 2, MARK)
            mine["tokens"] += piece.tokens
            mine["blocks"] += piece.blocks
            assert len(mine["blocks"]) == blocks_for(len(mine["tokens"])), "exactly the blocks the rows need"
            if piece.kind == "prefill":
                assert piece.start % GRID == 0
                assert piece.sample or (piece.start + len(piece.tokens)) % GRID == 0
            else:
                assert len(piece.tokens) == 1
                assert piece.sample
        held = [block for mine in self.known.values() for block in mine["blocks"]]
        assert len(set(held)) == len(held), "a block in two tables"
        assert all(0 <= block < self.limits.num_blocks for block in held)
        slots = [mine["slot"] for mine in self.known.values()]
        assert len(set(slots)) == len(slots), "a slot of two requests"


class Life(RuleBasedStateMachine):
    """Requests arrive, run, stop, fail and are aborted in any order."""

    @initialize(
        seqs=st.integers(1, 4), spare=st.integers(0, 120), cap=st.integers(1, 3), blocks=st.integers(1, 16), queue=st.integers(1, 3)
    )
    def build(self, seqs, spare, cap, blocks, queue):
        self.limits = limits(
            max_num_seqs=seqs, max_num_batched_tokens=GRID + seqs + spare, prefill_cap=cap * GRID, num_blocks=blocks, max_queue=queue,
            num_slots=seqs,
        )  # fmt: skip
        self.scheduler, self.worker = Scheduler(self.limits), Worker(self.limits)
        self.sources: dict[str, GenerateRequest] = {}
        self.produced: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.plan = None
        self.count = 0

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

    @rule(prompt=st.integers(1, 620), max_tokens=st.integers(1, 40), stop=st.lists(st.integers(0, 9), max_size=2))
    def arrive(self, prompt, max_tokens, stop):
        self.count += 1
        source = request(f"r{self.count}", prompt, max_tokens, stop)
        try:
            self.scheduler.add(source)
        except QueueFullError:
            assert self.scheduler.status.waiting >= self.limits.max_queue
        except ContextLengthError:
            longest = min(prompt + max_tokens, self.limits.max_model_len) - 1
            assert prompt >= self.limits.max_model_len or blocks_for(longest) > self.limits.num_blocks
        else:
            self.sources[source.id], self.produced[source.id] = source, []

    @precondition(lambda self: self.plan is None)
    @rule()
    def plan_a_step(self):
        self.plan = self.scheduler.schedule()
        if self.plan is None:
            assert not self.scheduler.has_work, "work is left but nothing is planned"
        else:
            self.worker.follow(self.plan)

    @precondition(lambda self: self.plan is not None)
    @rule(token=st.integers(0, 9))
    def finish_the_step(self, token):
        self.take(self.scheduler.update(answer(self.plan, token)))
        self.plan = None

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

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.finish_the_step(11)
        for _ in range(1500):
            self.plan_a_step()
            if self.plan is None:
                break
            self.finish_the_step(11)
        assert self.finished.keys() == self.sources.keys(), "every request finishes"
        assert empty(self.scheduler)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(remaining=st.integers(1, 10_000), room=st.integers(0, 10_000))
def test_a_chunk_ends_on_the_grid_or_with_the_prompt(remaining, room):
    rows = prefill_rows(remaining, room)
    assert 0 <= rows <= min(room, remaining)
    assert rows == remaining or rows % GRID == 0
    assert rows > min(room, remaining) - GRID


def test_the_ids_before_a_slice_are_newest_first():
    assert before([5, 6, 7], 0, 2, MARK) == (MARK, MARK)
    assert before([5, 6, 7], 1, 2, MARK) == (5, MARK)
    assert before([5, 6, 7], 3, 2, MARK) == (7, 6)
    assert before([5, 6, 7], 3, 4, MARK) == (7, 6, 5, MARK)


def test_a_request_from_first_to_last_step():
    scheduler = Scheduler(limits())
    scheduler.add(request(prompt=130, max_tokens=3))
    first = scheduler.schedule()
    (piece,) = first.slices
    assert (piece.kind, piece.start, len(piece.tokens), piece.blocks) == ("prefill", 0, 130, (0, 1, 2))
    assert (piece.fresh, piece.sample) == (True, True)
    (output,) = scheduler.update(answer(first, 40))
    assert (output.tokens, output.finish) == ((40,), None)
    second = scheduler.schedule()
    (piece,) = second.slices
    assert (piece.kind, piece.start, piece.tokens, piece.before) == ("decode", 130, (40,), (129, 128))
    assert (piece.blocks, piece.sampling) == ((), None)
    scheduler.update(answer(second, 41))
    (output,) = scheduler.update(answer(scheduler.schedule(), 42))
    assert (output.tokens, output.finish) == ((42,), "length")
    assert empty(scheduler)
    assert scheduler.status.generated_tokens == 3
    assert scheduler.status.prompt_tokens == 130
    scheduler.add(request("b"))
    assert scheduler.schedule().forget == (0,)


def test_a_stop_id_is_the_last_token_and_is_named():
    scheduler = Scheduler(limits())
    scheduler.add(request(stop=(7,), max_tokens=1))
    (output,) = run(scheduler)
    assert (output.tokens, output.finish, output.stop_token) == ((7,), "stop", 7)


def test_the_model_length_ends_an_answer():
    scheduler = Scheduler(limits())
    scheduler.add(request(prompt=598, max_tokens=10))
    outputs = run(scheduler)
    assert sum(len(o.tokens) for o in outputs) == 2
    assert outputs[-1].finish == "length"


def test_decode_rows_come_first_and_cap_the_prompts():
    scheduler = Scheduler(limits(num_blocks=40))
    scheduler.add(request("short", 5, 20))
    scheduler.update(answer(scheduler.schedule()))
    scheduler.add(request("long", 500, 1))
    plan = scheduler.schedule()
    assert [(s.kind, len(s.tokens)) for s in plan.slices] == [("decode", 1), ("prefill", 64)]


def test_alone_a_prompt_takes_the_whole_budget_down_to_the_grid():
    scheduler = Scheduler(limits())
    scheduler.add(request("long", 500, 1))
    assert [len(s.tokens) for s in scheduler.schedule().slices] == [192]


def test_a_short_prompt_fits_beside_a_long_one_that_must_wait_for_the_grid():
    scheduler = Scheduler(limits(num_blocks=40))
    for id, prompt in (("a", 500), ("b", 5)):
        scheduler.add(request(id, prompt, 1))
    plan = scheduler.schedule()
    assert [(s.request, len(s.tokens)) for s in plan.slices] == [(0, 192), (1, 5)]


def test_nobody_overtakes_the_head_of_the_queue():
    scheduler = Scheduler(limits(num_blocks=10))
    scheduler.add(request("a", 400, 10))
    scheduler.update(answer(scheduler.schedule()))
    scheduler.add(request("big", 400, 10))
    scheduler.add(request("small", 5, 1))
    while 0 in scheduler.running:
        assert scheduler.status.waiting == 2, "the small request could run now, but it came later"
        scheduler.update(answer(scheduler.schedule()))
    assert [s.request for s in scheduler.schedule().slices] == [1, 2]


def test_whatever_is_admitted_can_finish_without_waiting_for_blocks():
    scheduler = Scheduler(limits(num_blocks=4, max_num_seqs=3))
    for id in "abc":
        scheduler.add(request(id, 60, 60))  # two blocks each: two fit
    scheduler.update(answer(scheduler.schedule()))
    assert (scheduler.status.running, scheduler.status.waiting) == (2, 1)
    assert sum(o.finish == "length" for o in run(scheduler)) == 3


def test_the_queue_is_bounded():
    scheduler = Scheduler(limits(max_num_seqs=1, max_queue=2, num_slots=1))
    for id in "abc":
        scheduler.add(request(id))
    with pytest.raises(QueueFullError, match="limit is 2"):
        scheduler.add(request("d"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": 0}, RequestError, "needs a prompt"),
        ({"max_tokens": 0}, RequestError, "max_tokens"),
        ({"prompt": 600}, ContextLengthError, "600 tokens, but the maximum context length is 600"),
        ({"prompt": 500, "max_tokens": 90}, ContextLengthError, "need 10 blocks of the 9"),
    ],
)
def test_what_can_never_run_is_refused(changes, error, message):
    scheduler = Scheduler(limits(num_blocks=9))
    with pytest.raises(error, match=message):
        scheduler.add(request(**changes))
    assert empty(scheduler)


def test_an_id_may_be_used_again_only_after_its_end():
    scheduler = Scheduler(limits())
    scheduler.add(request())
    with pytest.raises(RequestError, match="'a' is already in use"):
        scheduler.add(request())
    scheduler.abort("a")
    scheduler.add(request())


def test_an_abort_during_a_step_discards_its_tokens():
    scheduler = Scheduler(limits())
    scheduler.add(request())
    plan = scheduler.schedule()
    assert scheduler.abort("a").finish == "abort"
    assert scheduler.update(answer(plan)) == []
    assert empty(scheduler)


def test_results_must_answer_the_plan():
    scheduler = Scheduler(limits())
    scheduler.add(request())
    plan = scheduler.schedule()
    with pytest.raises(EngineError, match="has not been answered"):
        scheduler.schedule()
    with pytest.raises(EngineError, match="does not answer"):
        scheduler.update(StepResult(step=plan.step + 1, slices=()))
    with pytest.raises(EngineError, match="0 tokens for a slice that asks for one"):
        scheduler.update(StepResult(step=plan.step, slices=(SliceResult(0, ()),)))


def test_the_work_of_a_step_does_not_grow_with_the_context(monkeypatch):
    class Watched(list):
        copied = 0

        def __getitem__(self, index):
            item = super().__getitem__(index)
            Watched.copied += len(item) if isinstance(index, slice) else 1
            return item

    scheduler = Scheduler(limits(max_model_len=100_000, num_blocks=2000, max_num_batched_tokens=100_000))
    scheduler.add(request("a", 50_000, 100))
    scheduler.update(answer(scheduler.schedule()))
    live = scheduler.running[0]
    live.tokens = Watched(live.tokens)
    for _ in range(10):
        scheduler.update(answer(scheduler.schedule()))
    assert Watched.copied <= 10 * 3
