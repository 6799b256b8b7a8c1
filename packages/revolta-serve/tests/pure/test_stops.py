"""Stop strings against a definition by brute force, over many cuts."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revolta_serve.text.stops import StopMatcher


def naive(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the match that ends earliest, then starts earliest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include_stop=include)
    out = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        out.append(text)
        if matched is not None:
            return out, matched
    return [*out, matcher.flush()], None


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["x", "A", "B", "y"], ["AB"], "x", "AB"),
        (["xA", "By"], ["AB"], "x", "AB"),
        (["xA", "By"], ["B", "AB"], "x", "AB"),
        (["xA", "By"], ["AB", "B"], "x", "AB"),
        (["xABCD"], ["ABCD", "BC"], "xA", "BC"),
        (["xA", "C"], ["AB"], "xAC", None),
        (["xA"], ["AB"], "xA", None),
        (["aab", "aab", "c"], ["aabc"], "aab", "aabc"),
        (["a🙂", "b"], ["🙂b"], "a", "🙂b"),
        (["x"], ["x"], "", "x"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], text: str, matched: str | None) -> None:
    out, found = run(pieces, stops)
    assert ("".join(out), found) == (text, matched)


def test_only_a_real_partial_match_waits() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("hello") == ("hello", None)
    assert matcher.push("\n") == ("", None)
    assert matcher.push("x") == ("\nx", None)
    assert matcher.push("\n\nUse") == ("", None)
    assert matcher.push("ful") == ("\n\nUseful", None)


def test_the_stop_text_is_kept_on_request() -> None:
    assert run(["xA", "By"], ["AB"], include=True) == (["x", "AB"], "AB")


texts = st.text("abA", max_size=24)


@settings(deadline=None)
@given(texts, st.lists(st.text("abA", min_size=1, max_size=5), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_cut_gives_the_definition(text: str, stops: list[str], rng: random.Random) -> None:
    cuts = sorted(rng.sample(range(len(text) + 1), rng.randint(0, len(text))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    out, matched = run(pieces, stops)
    expected = naive(text, stops)
    if expected is None:
        assert ("".join(out), matched) == (text, None)
    else:
        start, end = expected
        assert ("".join(out), matched) == (text[:start], text[start:end])
    # What is out at any time never has to be taken back, and what waits could still have become a match.
    seen = shown = ""
    for piece, released in zip(pieces, out, strict=False):
        seen, shown = seen + piece, shown + released
        if naive(seen, stops) is None:
            waiting = seen[len(shown) :]
            assert seen.startswith(shown)
            assert waiting == "" or any(stop.startswith(waiting) for stop in stops)


def test_long_stops_cost_constant_work_per_character() -> None:
    stops = ["a" * 1023 + chr(ord("b") + n) for n in range(16)]
    text = "a" * 3000
    out, matched = run(list(text), stops)
    assert ("".join(out), matched) == (text, None)
