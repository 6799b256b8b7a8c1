"""Answers caught in a loop."""

from collections.abc import Sequence

from revolta_serve.types import Repetition


def repeats(tokens: Sequence[int], begin: int, rule: Repetition) -> bool:
    """Whether tokens[begin:] ends with rule.count times one pattern of rule.shortest .. rule.longest ids.

    Looks at the last count * longest tokens only, and mostly at one of them for each length: called after every token.
    """
    length = len(tokens)
    for size in range(rule.shortest, rule.longest + 1):
        span = size * rule.count
        if span > length - begin:
            return False
        if tokens[-1] != tokens[-1 - size]:
            continue
        tail = tokens[length - span :]
        if tail[size:] == tail[:-size]:
            return True
    return False
