"""How many prompt tokens a slice may take, and the slices themselves: pure arithmetic on the position grid."""

from collections.abc import Sequence

from revolta_serve.model.model_config import GRID
from revolta_serve.scheduler.request import Request
from revolta_serve.types import Slice


def prefill_rows(remaining: int, room: int) -> int:
    """Prompt tokens to compute now, of `remaining` ones, with `room` left in the step.

    All of them if they fit, else a multiple of 64, possibly none. As every slice starts on the grid, it ends on the grid or at the
    end of the prompt, whatever else is in the step.
    """
    return remaining if remaining <= room else room // GRID * GRID


def blocks_for(tokens: int) -> int:
    """Token blocks that hold this many tokens."""
    return -(-tokens // GRID)


def before(tokens: Sequence[int], start: int, count: int, mark: int) -> tuple[int, ...]:
    """The `count` raw ids before position start, newest first; `mark` where the request has none."""
    return tuple(tokens[start - 1 - back] if start - 1 - back >= 0 else mark for back in range(count))


def make_slice(request: Request, rows: int, blocks: tuple[int, ...], *, history: int, mark: int) -> Slice:
    """The next `rows` tokens of a request, a decode row if its prompt is computed. `blocks` are those newly taken for them."""
    start, end = request.computed, request.computed + rows
    first = start == 0
    return Slice(
        request=request.number,
        kind="decode" if request.decoding else "prefill",
        slot=request.slot,
        start=start,
        tokens=tuple(request.tokens[start:end]),
        before=before(request.tokens, start, history, mark),
        blocks=blocks,
        fresh=first,
        sample=end == len(request.tokens),
        sampling=request.source.sampling if first else None,
    )
