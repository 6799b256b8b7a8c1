"""Stop strings over a stream of text.

The winner is the match that ends earliest; of those that end together, the one that starts earliest. Only text that may still
become a match is held back, so a stop string never leaks and nothing else waits.

One Knuth-Morris-Pratt automaton per stop string: its state after a character is the length of the longest prefix of the stop
string that the text ends with. A full state is a match that ends here, and the largest state is exactly what must be held back.
The work per character is constant (amortised), however long the stop strings are.
"""

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Holds back partial matches of one answer. After a match it must not be fed again."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`stops` are non-empty strings; `include_stop` keeps the matched text in the output."""
        self._stops = tuple(stops)
        self._failures = tuple(_failure(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self._include = include_stop

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may go out, matched stop string or None). What follows a match is dropped."""
        if not self._stops:
            return text, None
        seen = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            matched = self._advance(char)
            if matched is not None:
                self._held = ""
                return seen[: position if self._include else position - len(matched)], matched
        hold = max(self._states)
        self._held = seen[len(seen) - hold :]
        return seen[: len(seen) - hold], None

    def flush(self) -> str:
        """The partial match that the end of the text has refuted."""
        text, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return text

    def _advance(self, char: str) -> str | None:
        matched: str | None = None
        for number, stop in enumerate(self._stops):
            state, failure = self._states[number], self._failures[number]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop) and (matched is None or len(stop) > len(matched)):
                matched = stop
            self._states[number] = state
        return matched


@lru_cache(maxsize=1024)
def _failure(stop: str) -> tuple[int, ...]:
    """failure[i]: length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    failure = [0] * len(stop)
    state = 0
    for i in range(1, len(stop)):
        while state and stop[i] != stop[state]:
            state = failure[state - 1]
        if stop[i] == stop[state]:
            state += 1
        failure[i] = state
    return tuple(failure)
