"""What agents do to a cache: siblings with one system text, a parent and its children in turns, long chats; all stay warm."""

import pytest

from support.steps import Service, request, text

GRID = 64


def floor(tokens):
    return tokens // GRID * GRID


def fill(service, chats):
    """Leave the states of as many conversations behind: a cache is full in daily use."""
    for number in range(chats):
        service.run(f"before {number}", prompt=text(1000 + number, 150), max_tokens=70)


SYSTEM = text(1, 2000)


def sibling(number, max_tokens=20):
    return request(f"r{number}", SYSTEM + text(50 + number, 50), max_tokens, boundaries=(len(SYSTEM),), opening=len(SYSTEM), seed=number)


ROOMY = {"max_num_seqs": 4, "max_num_batched_tokens": 2048, "prefill_cap": 1664, "max_model_len": 3000, "num_blocks": 300}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("chats", [0, 20])
@pytest.mark.parametrize(("slots", "max_tokens", "budget"), [(9, 20, 2048), (16, 20, 2048), (9, 100, 2048), (9, 20, 1030)])
def test_siblings_share_their_system_text(together, chats, slots, max_tokens, budget):
    service = Service(**ROOMY | {"max_num_batched_tokens": budget}, num_slots=slots)
    fill(service, chats)
    if together:
        service.add(*(sibling(number, max_tokens) for number in range(10)))
        service.finish()
    for number in range(10):
        if not together:
            service.run(sibling(number, max_tokens))
        record = service.ended[f"r{number}"].record
        assert record.cached_tokens == (floor(len(SYSTEM)) if number else 0)
        assert record.miss == ("none" if number else "cold")
        assert record.seamless
        service.assert_solo(f"r{number}")
    service.assert_empty()


def test_siblings_that_come_together_compute_their_system_text_once():
    service = Service(**ROOMY | {"max_num_batched_tokens": 4096}, long_prefill=1024, num_slots=16)
    service.add(*(sibling(number) for number in range(10)))
    service.step()
    assert service.status.waiting_for_prefix == 9, "half of it is computed"
    service.step()
    assert service.status.waiting_for_prefix == 0, "all of it is; what they wait for now is a step"
    service.finish()
    assert service.status.prompt_tokens == 10 * 2050 - 9 * floor(2000)


class Chat:
    """One conversation: every prompt is the last one, its answer, and some new text."""

    count = 0

    def __init__(self, service, name, begin, *, system=0, kept=True):
        """kept: False if answers appear in the history in another spelling."""
        Chat.count += 100
        self.service, self.name, self.ids, self.system, self.kept = service, name, list(begin), system, kept
        self.turns, self.number = 0, 2000 + Chat.count
        self.prompt = 0
        """Length of the last one."""

    def say(self, more=0, max_tokens=8):
        """One turn; its record."""
        self.ids += text(self.number + self.turns, more)
        id = f"{self.name} {self.turns}"
        boundaries = sorted({self.system, self.prompt, len(self.ids)} - {0})
        record = self.service.run(id, prompt=self.ids, max_tokens=max_tokens, boundaries=tuple(boundaries), opening=self.system)
        self.turns, self.prompt = self.turns + 1, len(self.ids)
        self.ids += self.service.said[id] if self.kept else [token + 1 for token in self.service.said[id]]
        return record


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("max_tokens", [8, 100])
@pytest.mark.parametrize("chats", [0, 10])
def test_a_parent_and_two_children_stay_warm_with_a_slot_more_than_three_tips(kept, max_tokens, chats):
    service = Service(max_num_seqs=1, num_slots=1 + 4, max_num_batched_tokens=2048, prefill_cap=1664, max_model_len=6000, num_blocks=400)
    fill(service, chats)
    system = text(1, 500)
    chat = {
        name: Chat(service, name, system + text(10 + number, length - 500), system=500, kept=kept)
        for number, (name, length) in enumerate({"P": 900, "A": 1800, "B": 1800}.items())
    }
    for number, name in enumerate("PABABP"):
        known = chat[name].prompt or (len(system) if number else 1)
        record = chat[name].say(40, max_tokens)
        assert record.cached_tokens >= floor(known - 1), f"turn {number} of {name}"


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("max_tokens", [8, 100])
def test_a_long_chat_supersedes_itself_before_it_evicts_an_older_one(kept, max_tokens):
    service = Service(max_num_seqs=1, num_slots=1 + 4, max_num_batched_tokens=2048, prefill_cap=1664, max_model_len=6000, num_blocks=400)
    older = Chat(service, "older", text(1, 700), system=200, kept=kept)
    older.say(0, max_tokens)
    chat = Chat(service, "long", text(2, 300), system=200, kept=kept)
    for _ in range(20):
        known = chat.prompt
        assert chat.say(60, max_tokens).cached_tokens >= floor(known - 1)
    assert service.status.snapshots_evicted > 20
    known = older.prompt
    assert older.say(50, max_tokens).cached_tokens >= floor(known - 1)


def test_turns_of_a_long_conversation_recompute_two_blocks_at_most():
    service = Service(
        worker=False, max_num_seqs=1, num_slots=6, max_num_batched_tokens=2048, prefill_cap=1664, max_model_len=60_000, num_blocks=1000
    )
    chat = Chat(service, "long", text(1, 1000), system=1000)
    for turn in range(20):
        before, known = service.status.prompt_tokens, len(chat.ids)
        chat.say(2500, 100)
        rows = service.status.prompt_tokens - before
        assert rows < 2 * GRID + (2500 if turn else 3500)
        assert not turn or rows == chat.prompt - floor(known - 1), "all but what lies after the last grid position"
    assert chat.prompt > 50_000
