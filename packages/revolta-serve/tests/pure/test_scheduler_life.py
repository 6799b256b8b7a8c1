"""The scheduler as a whole: whatever arrives, is aborted, fails or is taken away, the books balance after every step, everybody comes to
an end, and everybody says what it would have said alone.

The worker is made of hashes (support.symbolic): any wrong restore, block or form of a row shows as another token.
"""

from collections import Counter

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from revolta_serve.cache.layout import blocks_for
from revolta_serve.model.model_config import GRID
from revolta_serve.types import Repetition, SamplingParams
from support.steps import Service, request, solo_hashes, text

LONGEST = 450
choice = st.integers(0, 999)

KINDS = {
    "plain": {}, "history": {"presence_penalty": 1.0}, "rows": {"prompt_logprobs": 0},
}  # fmt: skip


class Life(RuleBasedStateMachine):
    events: Counter = Counter()

    @initialize(
        seqs=st.integers(1, 4),
        blocks=st.sampled_from([8, 10, 14, 18, 40]),
        slots=st.integers(0, 8),
        budget=st.sampled_from([64, 130, 300, 500]),
        cap=st.integers(1, 3),
        long_prefill=st.sampled_from([0, 64, 128]),
        policy=st.sampled_from(["fcfs", "priority"]),
        generated=st.booleans(),
        prefix=st.sampled_from([True, True, True, True, True, False]),
        width=st.sampled_from([1, 3, 8]),
        bypass=st.integers(0, 3),
    )
    def build(self, seqs, blocks, slots, budget, cap, long_prefill, policy, generated, prefix, width, bypass):
        self.service = Service(
            max_num_seqs=seqs, max_num_batched_tokens=budget + seqs, prefill_cap=cap * GRID, max_model_len=LONGEST, max_queue=10_000,
            num_blocks=blocks, num_slots=seqs + slots, long_prefill=long_prefill, policy=policy, generated=generated, prefix=prefix,
            width=width, bypass_limit=bypass,
        )  # fmt: skip
        self.hashes: dict[str, dict[int, bytes]] = {}
        self.service.worker.watch = self.drawn
        self.scheduler = self.service.scheduler
        self.texts = [tuple(text(number, length)) for number, length in enumerate((250, 130, 64))]
        self.count = 0

    def drawn(self, number, position, seen):
        self.hashes.setdefault(self.scheduler.running[number].source.id, {})[position] = seen

    # What clients do.

    def submit(self, prompt, max_tokens, which, *, n=1):
        prompt = tuple(prompt)[: LONGEST - 20]
        most = GRID * self.service.limits.num_blocks
        prompt = prompt[: most - 40]
        max_tokens = min(max_tokens, most - len(prompt) + 1)
        for seed in range(n):
            kind = ("plain", "plain", "plain", "history", "rows")[which // 3 % 5]
            self.count += 1
            self.service.add(
                request(
                    f"r{self.count}", prompt, max_tokens, sampling=SamplingParams(seed=seed + which % 3, **KINDS[kind]),
                    stop=(7,) if which % 4 == 0 else (), boundaries=tuple(sorted({1 + which * 7 % len(prompt), len(prompt)})),
                    priority=which % 3, tenant="ab"[which % 2], cache_salt="s" if which % 11 == 0 else "",
                    repetition=Repetition(shortest=1, longest=3, count=2) if which % 7 == 0 else None,
                ),
                now=float(self.count),
            )  # fmt: skip

    @rule(
        which=choice,
        cut=choice,
        more=st.sampled_from([0, 1, 5, 70]),
        max_tokens=st.sampled_from([1, 3, 70, 150]),
        n=st.sampled_from([1, 2, 3]),
    )
    def a_text_is_begun_or_forked(self, which, cut, more, max_tokens, n):
        base = self.texts[which % len(self.texts)]
        at = (len(base), 1 + cut % len(base), len(base) // GRID * GRID or 1)[cut % 3]
        self.submit((*base[:at], *text(100 + which % 5, more)), max_tokens, which, n=n)

    @precondition(lambda self: self.service.said)
    @rule(which=choice, more=st.sampled_from([1, 5, 70]), max_tokens=st.sampled_from([3, 70]), n=st.sampled_from([1, 2]))
    def an_answer_is_followed_or_forked(self, which, more, max_tokens, n):
        said = self.service.said
        known = [id for id, tokens in said.items() if len(tokens) > GRID] or list(said)
        id = known[-1 - which % min(4, len(known))]
        prompt = (*self.service.sources[id].prompt, *said[id])
        self.texts = [*self.texts[-4:], prompt[:300]]
        self.submit((*prompt, *text(200 + which % 3, more)), max_tokens, which, n=n)

    @rule(which=choice)
    def a_crowd(self, which):
        """Choices of one prompt, then a prompt as long as can be, and small ones that might overtake it."""
        for length, max_tokens, n in ((200, 70, 2), (LONGEST, 3, 1), (5, 3, 2)):
            self.submit(text(500 + self.count, length), max_tokens, which, n=n)
        self.time_passes(3)

    @rule(which=st.integers(0, 2), turns=st.integers(1, 3), interrupted=st.booleans())
    def a_chat(self, which, turns, interrupted):
        """Every turn follows the answer of the one before, which may be taken away before it has ended."""
        prompt = self.texts[which % len(self.texts)]
        for _ in range(turns):
            self.submit(prompt, 100, which=1)
            self.time_passes(90 if interrupted else 200)
            if interrupted:
                self.preempt(0)
            prompt = (*prompt, *self.service.said[f"r{self.count}"], *text(300 + which, 5))

    # What happens.

    @rule(
        what=st.sampled_from(["leave", "corrupt", "preempt", "reset", "pause", "pause", "leave", "corrupt", "preempt", "fail"]),
        which=choice,
    )
    def something_happens(self, what, which):
        for _ in range(which % 3):
            self.one_step()
        getattr(self, what)(which)

    def leave(self, which):
        if not self.scheduler.live:
            return
        speaking = [id for id in self.scheduler.live if self.service.said[id]]
        whom = speaking if speaking and which % 3 else self.scheduler.live
        id = whom[which % len(whom)]
        assert self.service.abort(id).finish == "abort"
        assert self.scheduler.abort(id) is None

    @rule(count=st.sampled_from([1, 5, 20, 80, 200]))
    def time_passes(self, count):
        for _ in range(count):
            if self.one_step() is None:
                return

    def one_step(self, corrupt=False):
        scheduler = self.scheduler
        new = {each.number for each in scheduler.waiting if each.started < 0}
        plan = self.service.plan(now=0.0)
        for each in scheduler.waiting:
            self.events["waits for a prefix"] += each.waits_for is not None
            self.events["overtaken"] += each.bypassed > 0
            assert each.bypassed <= self.service.limits.bypass_limit
        if plan is None:
            assert not scheduler.has_work or not scheduler.admitting, "work is left but nothing is planned"
            assert not scheduler.running
            return None
        planned = {piece.request for piece in plan.slices}
        first = min(scheduler.running.values(), key=lambda each: each.order)
        assert first.number in planned, "whoever goes first goes on"
        assert scheduler.admitting or not new & planned, "somebody has started in a pause"
        self.events["restored"] += sum(piece.restore >= 0 for piece in plan.slices)
        self.events["swapped"] += sum(len(piece.swaps) for piece in plan.slices)
        self.events["replayed several rows"] += any(piece.kind == "decode" and len(piece.tokens) > 1 for piece in plan.slices)
        victims = {plan.slices[-1].request} if corrupt else frozenset()
        outputs = self.service.answer(plan, corrupt=victims)
        for output in outputs:
            assert (output.error is not None) == (output.finish == "error")
        return plan

    def corrupt(self, which):
        before = self.service.status.corrupted
        if self.one_step(corrupt=True):
            assert self.service.status.corrupted == before + 1

    def preempt(self, which):
        if which % 2:  # somebody in the middle of its prompt among them
            self.submit(text(400 + self.count, 200), 3, 1)
            self.one_step()
        waiting, running = len(self.scheduler.waiting), len(self.scheduler.running)
        self.scheduler.preempt_all()
        self.scheduler.audit()
        assert (len(self.scheduler.waiting), len(self.scheduler.running)) == (waiting + running, 0)
        assert self.service.status.blocks_used == self.service.status.slots_used == 0

    def reset(self, which):
        before, cache = self.service.status, self.scheduler.storage.cache
        result = self.scheduler.reset_cache()
        after = self.service.status
        assert (
            result.blocks_freed
            == before.blocks_cached
            == cache.blocks.num_free - (before.blocks_total - before.blocks_used - before.blocks_cached)
        )
        assert result.snapshots_freed == before.slots_cached
        assert result.blocks_in_use == before.blocks_used == after.blocks_used
        assert after.blocks_cached == after.slots_cached == 0
        assert (after.snapshots_evicted, after.blocks_evicted) == (before.snapshots_evicted, before.blocks_evicted)
        self.scheduler.audit()

    def pause(self, which):
        self.scheduler.admitting = False
        for _ in range(which % 30):
            if self.one_step() is None:
                break
        self.scheduler.admitting = True

    def fail(self, which):
        live = self.scheduler.live
        plan = self.service.plan() if which % 3 else None
        if plan and which % 3 == 1:
            self.service.worker.step(plan)
        elif plan:
            for number in plan.forget:
                self.service.worker.known.pop(number, None)
        outputs = self.scheduler.fail("worker raised")
        self.service.take(outputs)
        assert {output.id for output in outputs} == set(live)
        assert all((output.finish, output.error) == ("error", "worker raised") for output in outputs)
        self.service.assert_empty()
        status = self.service.status
        assert (status.blocks_cached, status.slots_cached) == (0, 0), "nothing that a half step has written may be reused"

    @invariant()
    def counts_are_true(self):
        if not hasattr(self, "service"):
            return
        self.events["steps"] += 1
        status = self.service.status
        assert status.running + status.waiting == len(self.scheduler.live) == len(self.service.sources) - len(self.service.ended)
        assert status.running <= self.service.limits.max_num_seqs
        assert status.blocks_used + status.blocks_cached <= status.blocks_total
        assert status.slots_used + status.slots_cached <= status.slots_total

    def teardown(self):
        if not hasattr(self, "service") or self.scheduler._planned:  # a step that did not pass its checks is open
            return
        sources = [self.service.sources[id] for id in self.scheduler.live]
        # In every step the first of those that run goes on, a chunk or a token; what a request may have to wait for is all others once.
        alone = sum(blocks_for(len(each.prompt)) + each.max_tokens + 2 for each in sources)
        for _ in range(alone * (len(sources) + 1)):
            if self.one_step() is None:
                break
        self.service.assert_empty()
        self.everybody_says_what_it_says_alone()
        status = self.service.status
        for name in ("preemptions_in_prefill", "rolling_lost", "blocks_deduplicated", "blocks_evicted", "snapshots_evicted",
                     "snapshots_skipped", "generated_hits", "replayed_tokens", "corrupted"):  # fmt: skip
            self.events[name] += getattr(status, name)
        self.events["preemptions in decode"] += status.preemptions - status.preemptions_in_prefill
        self.events.update({f"miss {name}": count for name, count in status.misses.items()})

    def everybody_says_what_it_says_alone(self):
        service = self.service
        for id, output in service.ended.items():
            source, said, record = service.sources[id], service.said[id], output.record
            if output.finish == "length":
                assert len(said) == source.max_tokens or len(source.prompt) + len(said) == LONGEST
            if output.finish == "stop":
                assert said[-1] == output.stop_token == 7
            wanted = source.sampling.prompt_logprobs >= 0
            if wanted and said:
                assert [entry.token for entry in service.told[id]] == list(source.prompt[1:])
            assert wanted or not service.told[id]
            if not said:
                continue
            assert (record.prompt_tokens, record.generated_tokens) == (len(source.prompt), len(said))
            alone = solo_hashes(source, LONGEST)
            same = all(alone[position] == seen for position, seen in self.hashes[id].items() if position in alone)
            # What a preemption takes away may be a path over generated text: then all is computed again, as a prompt.
            assert same == record.seamless or (same and record.preemptions), f"{id}: the record says seamless={record.seamless}"
            if record.seamless:
                service.assert_solo(id)
            self.events["seamless" if record.seamless else "not seamless"] += 1
            self.events[f"finish {output.finish}"] += 1
        self.events["left before a token"] += sum(output.finish == "abort" and not service.said[id] for id, output in service.ended.items())


EVENTS = {
    "preemptions_in_prefill", "preemptions in decode", "rolling_lost", "blocks_deduplicated", "blocks_evicted", "snapshots_evicted",
    "snapshots_skipped", "generated_hits", "replayed_tokens", "corrupted", "waits for a prefix", "overtaken", "restored", "swapped",
    "replayed several rows", "seamless", "not seamless", "finish stop", "finish length", "finish repetition", "finish abort",
    "left before a token",
    *(f"miss {name}" for name in ("none", "short", "disabled", "cold", "evicted", "no_snapshot", "generated_off")),
}  # fmt: skip


def live(*, examples, batches):
    """Run batches of examples until everything has happened once; a few seeds may miss what is rare."""
    Life.events = Counter()
    for number in range(batches):
        run_state_machine_as_test(
            hypothesis.seed(number)(Life), settings=settings(max_examples=examples, stateful_step_count=40, deadline=None)
        )
        missing = EVENTS - {event for event, count in Life.events.items() if count}
        if not missing:
            return
    raise AssertionError(f"never happened: {missing}, of {Life.events}")


def test_life():
    live(examples=20, batches=5)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_thousand_steps_of_life():
    live(examples=350, batches=1)
    assert Life.events["steps"] > 10_000
