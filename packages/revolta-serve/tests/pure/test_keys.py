"""Keys of blocks: equal for equal beginnings of one domain and salt, and for nothing else."""

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revolta_serve.cache.keys import KEY_BYTES, chain, root

BLOCK = 64
ROOT = root("model", "")


def test_a_key_is_a_hash_of_the_key_before_it_and_the_ids_as_little_endian_int32():
    tokens, expected, key = list(range(130)), [], ROOT
    for at in (0, 64):
        key = blake2b(key + struct.pack("<64i", *tokens[at : at + BLOCK]), digest_size=KEY_BYTES).digest()
        expected.append(key)
    assert chain(ROOT, tokens) == expected


@pytest.mark.parametrize(("length", "count"), [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2)])
def test_only_whole_blocks_have_keys(length, count):
    assert len(chain(ROOT, range(length))) == count


@given(length=st.integers(0, 400), whole=st.integers(0, 6))
def test_a_chain_can_be_continued_at_any_block(length, whole):
    tokens = tuple(i * i for i in range(length))
    keys = chain(ROOT, tokens)
    first = min(whole, len(keys))
    assert chain(keys[first - 1] if first else ROOT, tokens, first * BLOCK) == keys[first:]
    assert chain(ROOT, tokens[: first * BLOCK]) == keys[:first]


@given(at=st.integers(0, 255))
def test_one_other_id_changes_the_key_of_its_block_and_all_after_it(at):
    tokens = list(range(256))
    before = chain(ROOT, tokens)
    tokens[at] += 1
    after = chain(ROOT, tokens)
    assert [a == b for a, b in zip(before, after, strict=True)] == [block < at // BLOCK for block in range(4)]


def test_lists_and_tuples_have_the_same_keys():
    assert chain(ROOT, [*range(70)]) == chain(ROOT, tuple(range(70)))


def test_domain_and_salt_tell_chains_apart_and_cannot_be_shifted_into_each_other():
    pairs = [("", ""), ("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("ä", "")]
    roots = {root(*pair) for pair in pairs}
    assert len(roots) == len(pairs)
    assert {len(key) for key in roots} == {KEY_BYTES}
    assert root("ab", "c") == root("ab", "c")
