"""A scheduler without a model: requests, limits, answers to its plans, and a worker that checks each plan can be carried out."""

from revolta_serve.model.model_config import GRID
from revolta_serve.scheduler.plan import before, blocks_for
from revolta_serve.scheduler.scheduler import Limits
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
