"""Who starts when: the order of the queue, room for what is known, and the few that may overtake."""

import pytest

from support.steps import Service, request, text


def started(plan):
    """Numbers of the requests that a plan introduces."""
    return [piece.request for piece in plan.slices if piece.sampling is not None]


def test_no_more_run_than_may():
    service = Service(max_num_seqs=2)
    service.add(*(request(id, text(place, 5), 3) for place, id in enumerate("abc")))
    assert started(service.step()) == [0, 1]
    service.finish()
    service.assert_empty()


def test_a_request_starts_when_its_known_tokens_fit_beside_what_was_promised():
    service = Service(num_blocks=10, max_num_batched_tokens=260, prefill_cap=128, long_prefill=64, bypass_limit=0)
    service.add(request("a", text(1, 300), 9), request("b", text(2, 330), 9), request("c", text(3, 310), 9))
    assert started(service.step()) == [0]
    assert service.scheduler.storage.owed == 4, "five blocks, of which one is handed out"
    assert started(service.step()) == [], "eight are left, of which three are promised; six are needed"
    service.abort("b")
    assert started(service.step()) == [2]
    service.finish()
    assert service.status.preemptions == 0
    service.assert_empty()


def test_answers_take_their_blocks_as_they_go():
    service = Service(num_blocks=4, max_num_seqs=3)
    service.add(*(request(id, text(place, 60), 60) for place, id in enumerate("abc")))  # two blocks each at their longest
    assert started(service.step()) == [0, 1, 2]
    service.finish()
    service.assert_empty()
    for id in "abc":
        service.assert_solo(id)


def blocked(small=4, *, limit=4, prompt=300, **changes):
    """One runs, a big one waits for blocks, small ones come after it."""
    service = Service(num_blocks=10, max_num_seqs=9, max_num_batched_tokens=1000, prefill_cap=640, bypass_limit=limit, **changes)
    service.add(request("runs", text(1, 330), 54), now=0.0)
    assert started(service.step(now=0.0)) == [0]
    service.add(request("big", text(2, prompt), 2), now=100.0)
    service.add(*(request(f"small {n}", text(3 + n, 5), 2) for n in range(small)), now=100.0)
    return service


def test_a_few_small_ones_overtake_one_that_waits_for_blocks():
    service = blocked(small=4, limit=3, bypass_seconds=60.0)
    assert started(service.step(now=100.0)) == [2, 3, 4]
    assert started(service.step(now=100.0)) == []
    assert "small 3" in service.scheduler.live, "three may, not four"
    service.finish()
    assert list(service.ended)[-2:] == ["big", "small 3"] or list(service.ended)[-2:] == ["small 3", "big"]
    service.assert_empty()


def test_a_limit_of_none_keeps_the_order():
    service = blocked(limit=0)
    assert started(service.step(now=100.0)) == []
    service.scheduler.abort("runs")
    assert started(service.step(now=100.0)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("now", "overtakes"), [(159.0, [2, 3, 4, 5]), (160.0, [])])
def test_nobody_overtakes_one_that_has_waited_long(now, overtakes):
    service = blocked(bypass_seconds=60.0)
    assert started(service.step(now=now)) == overtakes


def test_who_overtakes_leaves_room_for_the_one_that_waits_even_at_its_longest():
    service = blocked(small=0, prompt=500)
    # Eight of the ten blocks are for the big one: two are left, however long those that overtake it become.
    service.add(request("long", text(5, 5), 200), request("short", text(6, 5), 100), request("shorter", text(7, 5), 50), now=100.0)
    assert started(service.step(now=100.0)) == [3]
    assert started(service.step(now=100.0)) == []
    service.finish()
    service.assert_empty()


def test_who_has_overtaken_counts_until_it_has_ended():
    service = blocked(small=0, prompt=500)
    service.add(request("one", text(5, 5), 80), now=100.0)
    assert started(service.step(now=100.0)) == [2]
    service.add(request("two", text(6, 5), 10), now=100.0)
    assert started(service.step(now=100.0)) == []
    service.abort("one")
    assert started(service.step(now=100.0)) == [3]


def test_tenants_take_turns():
    service = Service(max_num_seqs=2)
    tenants = {"a0": "a", "a1": "a", "a2": "a", "b0": "b", "b1": "b"}
    service.add(*(request(id, text(place, 5), 1, tenant=tenant) for place, (id, tenant) in enumerate(tenants.items())))
    ids = list(tenants)
    order = [[ids[number] for number in started(service.step())] for _ in range(3)]
    assert order == [["a0", "b0"], ["a1", "b1"], ["a2"]]


def test_a_lower_priority_number_starts_first_where_the_policy_says_so():
    for policy, expected in (("fcfs", [0, 1, 2]), ("priority", [2, 1, 0])):
        service = Service(max_num_seqs=1, policy=policy)
        service.add(*(request(id, text(place, 5), 1, priority=5 - place) for place, id in enumerate("abc")))
        assert [started(service.step())[0] for _ in range(3)] == expected


def test_by_priority_decides_also_who_is_computed_first():
    service = Service(policy="priority", num_blocks=40, max_num_batched_tokens=130, prefill_cap=128, long_prefill=64)
    service.add(request("late", text(1, 300), 9, priority=5))
    service.step()
    service.add(request("soon", text(2, 300), 9, priority=1))
    service.step()
    assert [piece.request for piece in service.step().slices] == [1, 0]
    service.finish()


def test_what_had_no_room_is_looked_at_again_when_there_is():
    service = Service(num_blocks=8, max_num_batched_tokens=1000, prefill_cap=640)
    service.run("before", prompt=text(1, 130), max_tokens=1)
    service.add(request("runs", text(2, 300), 9))
    service.step()
    service.add(request("waits", [*text(1, 130), *text(3, 130)], 2))
    looks = []
    find = service.scheduler.storage._find
    service.scheduler.storage._find = lambda each: looks.append(each.number) or find(each)
    for _ in range(5):
        assert started(service.step()) == []
    assert looks == [2], "nothing has changed: one look is enough"
    service.finish()
    service.assert_empty()
    assert service.ended["waits"].record.cached_tokens == 128


def test_a_request_finds_a_slot_though_only_its_own_beginning_has_one():
    service = Service(max_num_seqs=1, num_slots=1)
    service.run("a", prompt=128, max_tokens=1)
    assert service.status.slots_cached == 1
    record = service.run("b", prompt=140, max_tokens=2)
    assert record.cached_tokens == 0, "a request is worth more than its beginning"
    service.assert_solo("b")
    service.assert_empty()


def test_a_rolling_snapshot_makes_room_for_a_request_that_starts():
    service = Service(max_num_seqs=3, num_slots=4)
    service.add(request("a", text(1, 5), 150), request("b", text(2, 5), 150))
    service.steps(70)
    rolling = [each.rolling for each in service.scheduler.running.values()]
    assert min(rolling) >= 0
    service.add(request("c", text(3, 5), 90))
    assert started(service.step()) == [2]
    a, b, c = service.scheduler.running.values()
    assert (a.rolling, b.rolling, c.slot) == (rolling[0], -1, rolling[1]), "of whoever goes last"
    service.finish()
    service.assert_empty()
    for id in "abc":
        service.assert_solo(id)


def test_a_rolling_snapshot_stays_while_a_request_waits_for_blocks():
    service = Service(max_num_seqs=3, num_slots=4, num_blocks=8)
    service.add(request("a", text(1, 5), 150), request("b", text(2, 5), 150))
    service.steps(70)
    service.add(request("c", text(3, 400), 9))
    assert started(service.step()) == []
    assert all(each.rolling >= 0 for each in service.scheduler.running.values())
    service.finish()
    service.assert_empty()


def test_who_backs_out_leaves_the_snapshot_to_whoever_reads_it():
    service = Service(max_num_seqs=2, num_slots=3, num_blocks=12, max_num_batched_tokens=3000, prefill_cap=1664, max_model_len=1000)
    service.run("before", prompt=[*range(128), 1], max_tokens=1)
    service.add(request("a", [*range(128), *text(1, 100)], 3))
    service.add(request("b", [*range(128), *text(2, 570)], 3), request("c", text(3, 10), 3))
    # a resumes; b would resume from there too, but has no room for the rest; c overtakes it and needs a slot.
    plan = service.plan()
    service.answer(plan)
    service.finish()
    service.assert_empty()
    for id in "abc":
        service.assert_solo(id)
