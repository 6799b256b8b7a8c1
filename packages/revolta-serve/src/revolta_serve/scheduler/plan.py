"""How many prompt tokens a slice may take, and the slices themselves: pure arithmetic on the position grid."""

from collections.abc import Sequence

from revolta_serve.model.model_config import GRID
from revolta_serve.scheduler.request import Request
from revolta_serve.types import History, Slice


def prefill_rows(remaining: int, room: int) -> int:
    """Prompt tokens to compute now, of `remaining` ones, with `room` left in the step.

    All of them if they fit, else a multiple of 64, possibly none. As every slice starts on the grid, it ends on the grid or at the
    end of the prompt, whatever else is in the step.
    """
    return remaining if remaining <= room else room // GRID * GRID


def before(tokens: Sequence[int], start: int, count: int, mark: int) -> tuple[int, ...]:
    """The `count` raw ids before position start, newest first; `mark` where the request has none."""
    if start > count:
        return tuple(tokens[start - 1 : start - 1 - count : -1])
    return tuple(tokens[start - 1 - back] if start - 1 - back >= 0 else mark for back in range(count))


def next_row(request: Request, history: int, mark: int) -> Slice:
    """The one row of a usual answer step: nothing to say beside it. The same as make_slice, for a third of its time."""
    start, tokens = request.computed, request.tokens
    return Slice(
        request=request.number,
        kind="decode",
        slot=request.slot,
        start=start,
        tokens=(tokens[start],),
        before=tuple(tokens[start - 1 : start - 1 - history : -1]) if start > history else before(tokens, start, history, mark),
    )


def make_slice(
    request: Request,
    end: int,
    blocks: tuple[int, ...],
    *,
    restore: int = -1,
    snapshots: tuple[tuple[int, int], ...] = (),
    history: int,
    mark: int,
) -> Slice:
    """The tokens up to `end` that a request has not computed, as answer rows if its prompt is. `blocks` go to its block table first."""
    start, tokens, length = request.computed, request.tokens, request.prompt_length
    params = request.source.sampling
    swaps: tuple[tuple[int, int], ...] = ()
    logprobs_from, next_token = -1, -1
    if request.swaps:
        swaps, request.swaps = tuple(request.swaps), []
    if params.prompt_logprobs >= 0 and request.told < min(end, length - 1):
        logprobs_from, next_token = max(0, request.told - start), tokens[end] if end < length else -1
    new = not request.introduced
    request.introduced = True
    return Slice(
        request=request.number,
        kind="decode" if start >= length else "prefill",
        slot=request.slot,
        start=start,
        tokens=tuple(tokens[start:end]),
        before=before(tokens, start, history, mark),
        blocks=blocks,
        swaps=swaps,
        fresh=start == 0,
        restore=restore,
        snapshots=snapshots,
        sample=end == len(tokens),
        sampling=params if new else None,
        history=History(prompt=request.source.prompt, answer=tuple(tokens[length:])) if new and params.needs_history else None,
        logprobs_from=logprobs_from,
        next_token=next_token,
    )
