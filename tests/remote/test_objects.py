"""Objects exist as long as a process holds them, in any order of the messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.remote.objects import ObjectStore, TokenCounter


def test_the_last_drop_frees_the_object():
    objects = ObjectStore()
    number = objects.add("thing", 1, -1)
    objects.lend(number, 2, 0)
    assert objects.drop(number, 1) is None
    assert objects.value(number) == "thing"
    assert objects.drop(number, 2) == "thing"
    assert len(objects) == 0


def test_a_drop_may_come_before_its_lend():
    objects = ObjectStore()
    number = objects.add("thing", 1, -1)
    assert objects.drop(number, 2) is None
    objects.lend(number, 2, 0)
    assert objects.drop(number, 1) == "thing"


def test_the_exit_of_a_holder_frees_its_objects():
    objects = ObjectStore()
    mine, shared = objects.add("mine", 1, 2), objects.add("shared", 3, 2)
    objects.lend(shared, 4, -1)
    assert objects.drop_holder(2) == ["mine"]
    objects.lend(shared, 5, 2)  # was on its way
    assert objects.drop(shared, 4) == "shared"
    assert objects.drop(mine, 1) is None


def test_tokens_of_different_processes_differ():
    made = [
        tokens.new() for rank in (-1, 0, 1) for tokens in [TokenCounter(rank)] for _ in range(100)
    ]
    assert len(set(made)) == 300


@given(st.data())
def test_an_object_exists_exactly_as_long_as_it_is_held(data):
    """Holders lend and drop at will; each one's news come in order, mixed with the others'."""
    objects = ObjectStore()
    number = objects.add("thing", 0, 0)
    held = {0: 0}  # token -> holder
    news: dict[int, list[tuple[str, int, int]]] = {0: [], 1: [], 2: []}
    for token in range(1, data.draw(st.integers(1, 8))):
        if not held:
            break
        lender = held[data.draw(st.sampled_from(sorted(held)))]
        borrower = data.draw(st.integers(0, 2))
        news[lender].append(("lend", token, borrower))
        held[token] = borrower
        for dropped in data.draw(st.sets(st.sampled_from(sorted(held)))):
            news[held.pop(dropped)].append(("drop", dropped, 0))
    freed = 0
    while waiting := [holder for holder, told in news.items() if told]:
        what, token, borrower = news[data.draw(st.sampled_from(waiting))].pop(0)
        if what == "lend":
            objects.lend(number, token, borrower)
        else:
            freed += objects.drop(number, token) is not None
    assert freed == (not held)
    assert len(objects) == bool(held)
