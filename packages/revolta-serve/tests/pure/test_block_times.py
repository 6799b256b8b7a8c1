"""How long cached blocks lived and waited, with a clock of the test's own."""

from types import SimpleNamespace

from revolta_serve.cache.block_times import BlockTimes
from revolta_serve.cache.prefix_cache import PrefixCache
from revolta_serve.types import BLOCK_AGES
from support.steps import Service, text

Clock = SimpleNamespace


def grow(cache, word):
    """Compute a path of one block a letter, with a snapshot at its end, and let it go."""
    tip = None
    for depth in range(1, len(word) + 1):
        (block,) = cache.take_blocks(1)
        tip = cache.extend(tip, word[:depth].encode(), 64, block)
    cache.store(tip, cache.take_slot())
    cache.index.release(tip)
    return tip


def counted(ages):
    """Bound -> count, of those that are not zero; None stands for above all."""
    return {bound: count for bound, count in zip((*BLOCK_AGES, None), ages.counts, strict=True) if count}


def test_a_life():
    clock = Clock(now=1000.0)
    cache = PrefixCache(2, 1, BlockTimes(lambda: clock.now))
    tip = grow(cache, "ab")
    clock.now += 4
    cache.times.reused([tip, tip.parent])
    clock.now += 20
    cache.times.reused([tip.parent])
    clock.now += 100_000
    grow(cache, "xy")
    ages = cache.times.ages()
    assert (counted(ages["reuse_gap"]), ages["reuse_gap"].seconds) == ({5: 2, 30: 1}, 4 + 4 + 20)
    assert (counted(ages["lifetime"]), ages["lifetime"].seconds) == ({None: 2}, 2 * 100_024)
    assert (counted(ages["idle_before_evict"]), ages["idle_before_evict"].seconds) == ({None: 2}, 100_000 + 100_020)


def test_bounds_belong_to_the_count_below():
    clock = Clock(now=0.0)
    times = BlockTimes(lambda: clock.now)
    node = object()
    times.computed(node)
    clock.now += BLOCK_AGES[0]
    times.evicted(node)
    assert counted(times.ages()["lifetime"]) == {BLOCK_AGES[0]: 1}


def test_what_a_reset_or_distrust_removes_was_not_evicted():
    cache = PrefixCache(4, 1, BlockTimes())
    grow(cache, "ab")
    cache.clear()
    (block,) = cache.take_blocks(1)
    cache.discard(cache.extend(None, b"x", 64, block))
    assert not any(sum(ages.counts) for ages in cache.times.ages().values())
    assert not cache.times._times


def test_a_request_that_resumes_reuses_its_blocks_once():
    service = Service(block_times=True)
    service.run("a", prompt=text(1, 300), max_tokens=1)
    assert service.run("b", prompt=text(1, 300), max_tokens=1).cached_tokens == 256
    ages = service.status.block_ages
    assert sum(ages["reuse_gap"].counts) == 4
    assert sum(ages["lifetime"].counts) == 0
    assert Service().status.block_ages == {}
