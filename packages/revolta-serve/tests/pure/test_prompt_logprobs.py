"""Logprobs of prompts: every position once, in order, whatever is cached, cut or preempted."""

import pytest

from support.steps import Service, request, text


def told(service, id):
    return [entry.token for entry in service.told[id]]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 300])
@pytest.mark.parametrize("budget", [67, 500])
def test_every_position_but_the_first_is_told_once(length, budget):
    service = Service(max_num_batched_tokens=budget)
    service.run("a", prompt=text(1, length), prompt_logprobs=0)
    assert told(service, "a") == text(1, length)[1:]


def test_they_come_as_they_are_computed():
    service = Service(max_num_batched_tokens=67)
    service.add(request("a", 200, 2, prompt_logprobs=0))
    outputs = [service.answer(service.plan()) for _ in range(4)]
    assert [[len(output.prompt_logprobs) for output in each] for each in outputs] == [[64], [64], [64], [7]]
    assert [[len(output.tokens) for output in each] for each in outputs] == [[0], [0], [0], [1]]


def test_what_is_cached_is_computed_again_for_them():
    service = Service()
    service.run("before", prompt=300)
    service.run("a", prompt=300, prompt_logprobs=0)
    assert told(service, "a") == list(range(1, 300))
    other = Service()
    other.run("a", prompt=300, prompt_logprobs=0)
    assert service.told["a"] == other.told["a"]
    service.assert_solo("a")


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("keep", [True, False])
def test_a_preemption_neither_repeats_nor_skips_any(steps, keep):
    service = Service(max_num_batched_tokens=67)
    service.add(request("a", 300, 5, prompt_logprobs=0))
    for _ in range(3):
        service.steps(steps)
        service.scheduler.preempt_all()
        if not keep:
            service.scheduler.reset_cache()
        if "a" in service.ended:
            break
    service.finish()
    assert told(service, "a") == list(range(1, 300))
    other = Service()
    other.run("a", prompt=300, prompt_logprobs=0)
    assert service.told["a"] == other.told["a"]
    service.assert_solo("a")


def test_one_that_was_preempted_does_not_come_back_beyond_what_it_has_told():
    service = Service(max_num_seqs=1, max_num_batched_tokens=67, policy="priority")
    service.add(request("a", 300, 5, prompt_logprobs=0, priority=1))
    service.steps(2)
    service.scheduler.preempt_all()
    service.add(request("same", 300, 2, priority=0))
    service.finish()
    assert list(service.ended) == ["same", "a"]
    assert told(service, "a") == list(range(1, 300))


def test_others_use_what_was_computed_for_them():
    service = Service()
    service.run("a", prompt=300, prompt_logprobs=0)
    assert service.run("b", prompt=300).cached_tokens == 256
    service.assert_solo("b")
