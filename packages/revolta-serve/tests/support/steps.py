"""A scheduler without a model: requests, limits, answers to its plans, and a service around it that checks every step."""

from msgspec.structs import replace

from revolta_serve.model.model_config import GRID
from revolta_serve.scheduler.limits import Limits
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.types import GenerateRequest, Output, SamplingParams, SliceResult, StepPlan, StepResult
from support.symbolic import SymbolicWorker

MARK = 999


def limits(**changes):
    values = {
        "max_num_seqs": 3, "max_num_batched_tokens": 200, "prefill_cap": 64, "max_model_len": 600, "max_queue": 50, "num_blocks": 30,
        "num_slots": 12, "history": 2, "mark": MARK,
    }  # fmt: skip
    return Limits(**values | changes)


def request(id="a", prompt=5, max_tokens=4, *, seed=0, prompt_logprobs=-1, stop=(), **fields):
    """`prompt`: ids, or how many."""
    ids = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    sampling = fields.pop("sampling", SamplingParams(seed=seed, prompt_logprobs=prompt_logprobs))
    return GenerateRequest(id=id, prompt=ids, max_tokens=max_tokens, sampling=sampling, stop_token_ids=tuple(stop), **fields)


def text(number, length):
    """`length` ids that no text with another number begins with or contains a block of."""
    return [(number * 7919 + place * place * 31 + place) % 100_003 for place in range(length)]


def answer(plan: StepPlan, token=7, corrupt=()):
    """What a worker would say: `token` wherever the plan asks for one."""
    return StepResult(
        step=plan.step,
        slices=tuple(
            SliceResult(piece.request, (token,) if piece.sample and piece.request not in corrupt else (), piece.request in corrupt)
            for piece in plan.slices
        ),
    )


class Service:
    """A scheduler and a worker of hashes. Every step is executed, audited and held against the limits; everything said is kept."""

    def __init__(self, *, worker=True, **changes):
        """worker: False for long prompts, whose hashes would take long: then every token is a 7."""
        self.limits = limits(**changes)
        self.scheduler = Scheduler(self.limits)
        self.worker = SymbolicWorker(self.limits) if worker else None
        self.sources: dict[str, GenerateRequest] = {}
        self.said: dict[str, list[int]] = {}
        self.told: dict[str, list] = {}
        """Prompt logprobs."""
        self.ended: dict[str, Output] = {}

    @property
    def status(self):
        return self.scheduler.status

    def add(self, *requests, now=0.0):
        self.scheduler.add(requests, now)
        for each in requests:
            self.sources[each.id], self.said[each.id], self.told[each.id] = each, [], []
            self.ended.pop(each.id, None)

    def plan(self, now=0.0):
        return self.scheduler.schedule(now)

    def answer(self, plan, now=0.0, corrupt=frozenset()):
        result = self.worker.step(plan, corrupt) if self.worker else answer(plan, corrupt=corrupt)
        outputs = self.scheduler.update(result, now)
        self.take(outputs)
        self.scheduler.audit()
        return outputs

    def step(self, now=0.0):
        """One step; its plan, None if there was nothing to compute."""
        plan = self.plan(now)
        if plan is not None:
            self.answer(plan, now)
        return plan

    def steps(self, count, now=0.0):
        return [self.step(now) for _ in range(count)]

    def finish(self, most=20_000):
        """Run until every request has ended."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            assert self.step() is not None, f"nothing is planned, but {self.scheduler.live} have not ended"
        raise AssertionError(f"{self.scheduler.live} do not end")

    def run(self, each, **fields):
        """Add one request, run it to its end and return its record."""
        self.add(each if isinstance(each, GenerateRequest) else request(each, **fields))
        self.finish()
        return self.ended[each.id if isinstance(each, GenerateRequest) else each].record

    def abort(self, id):
        output = self.scheduler.abort(id)
        self.take([output] if output else [])
        self.scheduler.audit()
        return output

    def take(self, outputs):
        for output in outputs:
            assert output.id not in self.ended, "an output after the last one"
            self.said[output.id] += output.tokens
            self.told[output.id] += output.prompt_logprobs
            if output.finish:
                self.ended[output.id] = output

    def assert_empty(self):
        """Nothing is left behind by those that have ended."""
        status = self.status
        assert not self.scheduler.has_work
        assert self.ended.keys() == self.sources.keys()
        assert (status.running, status.waiting, status.blocks_used, status.slots_used) == (0, 0, 0, 0)
        assert not self.scheduler.storage.owed
        assert not self.scheduler.storage._coming
        assert not self.scheduler.storage.cache.being_read

    def assert_solo(self, id):
        """What a request has said is the beginning of what it says when nobody else is there and nothing is reused."""
        source, said = self.sources[id], self.said[id]
        assert said == solo(source, self.limits.max_model_len)[: len(said)], f"{id} says something else than alone"


_solo: dict[tuple, tuple[list[int], dict[int, bytes]]] = {}


def _alone(source, max_model_len):
    """What a request says, and the hashes it is drawn from by position, in a service of its own with room for everything."""
    key = source.prompt, source.max_tokens, source.sampling, source.stop_token_ids, source.repetition, max_model_len
    if key not in _solo:
        blocks = -(-max_model_len // GRID)
        alone = Service(
            max_num_seqs=1, max_num_batched_tokens=max_model_len + GRID, prefill_cap=GRID * blocks, max_model_len=max_model_len,
            num_blocks=blocks, num_slots=4,
        )  # fmt: skip
        hashes: dict[int, bytes] = {}
        alone.worker.watch = lambda _, position, seen: hashes.update({position: seen})
        alone.run(replace(source, id="alone", boundaries=()))
        _solo[key] = alone.said["alone"], hashes
    return _solo[key]


def solo(source, max_model_len):
    """The tokens of a request that is alone."""
    return _alone(source, max_model_len)[0]


def solo_hashes(source, max_model_len):
    """What its tokens are drawn from, by position."""
    return _alone(source, max_model_len)[1]
