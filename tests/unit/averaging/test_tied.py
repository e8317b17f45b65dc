"""Tied weights: what a stage sends when, and why it refuses what is late, repeated or wrong."""

import pytest

from ravnest.averaging.tied import TiedOrder
from ravnest.errors import ProtocolError
from ravnest.protocol.averaging import TiedCall, TiedGradient, TiedHolder, TiedStep
from ravnest.protocol.messages import Refusal
from tests.support.tied_order import deliver

NODES = ("root", "middle", "leaf")
PLACES = {"root": (0, 4), "middle": (4, 8), "leaf": (8, 12)}


def order(node: str, uses: dict[str, tuple[int, ...]] | None = None) -> TiedOrder[float]:
    return TiedOrder(1, node, NODES, PLACES[node], {"w": (0, 11)} if uses is None else uses)


def holder(node: str, is_answer: bool = True) -> TiedHolder:
    return TiedHolder(1, *PLACES[node], is_answer)


def met_home() -> TiedOrder[float]:
    home = order("root")
    assert deliver(home, "leaf", holder("leaf")) == []
    return home


def test_a_home_calls_adds_up_and_numbers_the_step_for_all() -> None:
    home = met_home()
    assert home.offer(0.5, {"w": 3.0}) == [("leaf", TiedCall(1, 1, ("w",), False))]
    assert not home.is_settled
    made = deliver(home, "leaf", TiedGradient(1, 1, (("w", 4.0),)))
    assert made == [(node, TiedStep(1, 1, 0.5, (("w", 7.0),))) for node in ("root", "leaf")]
    assert home.is_settled
    assert home.stamp == (("root", 1),)


def test_while_a_call_is_open_gradients_are_gathered_for_the_next() -> None:
    home = met_home()
    home.offer(0.5, {"w": 3.0})
    assert home.offer(0.4, {"w": 10.0}) == []
    assert home.offer(0.3, {"w": 20.0}, is_closing=True) == []
    made = deliver(home, "leaf", TiedGradient(1, 1, ()))
    assert made[:2] == [(node, TiedStep(1, 1, 0.3, (("w", 3.0),))) for node in ("root", "leaf")]
    assert made[2:] == [("leaf", TiedCall(1, 2, ("w",), True))]
    made = deliver(home, "leaf", TiedGradient(1, 2, (("w", 1.0),)))
    assert made[0] == ("root", TiedStep(1, 2, 0.3, (("w", 16.0),)))


def test_nothing_is_called_for_before_all_holders_are_known() -> None:
    home = order("root", {"w": (0, 5, 11)})
    deliver(home, "leaf", holder("leaf"))
    assert home.offer(0.5, {"w": 3.0}) == []
    assert home.change({"w": 1.0}) == []
    assert not home.is_settled
    made = deliver(home, "middle", holder("middle", is_answer=False))
    assert made[0] == ("middle", TiedHolder(1, 0, 4, True))
    steps = [(node, TiedStep(1, 1, None, (("w", 1.0),))) for node in ("root", "leaf", "middle")]
    assert made[1:4] == steps
    assert [receiver for receiver, message in made[4:]] == ["leaf", "middle"]


def test_sums_are_made_from_the_leaf_to_the_home() -> None:
    home = order("root", {"w": (0, 5, 11)})
    for node in ("middle", "leaf"):
        deliver(home, node, holder(node))
    home.offer(0.5, {"w": 1.0})
    assert deliver(home, "middle", TiedGradient(1, 1, (("w", 1e16),))) == []
    made = deliver(home, "leaf", TiedGradient(1, 1, (("w", -1e16),)))
    assert made[0] == ("root", TiedStep(1, 1, 0.5, (("w", 1.0),)))  # (-1e16 + 1e16) + 1


def test_a_follower_answers_with_the_mean_since_the_last_call() -> None:
    leaf = order("leaf")
    assert leaf.offer(0.5, {"w": 2.0}) == []
    leaf.offer(0.5, {"w": 6.0})
    assert leaf.is_settled  # it waits for nobody
    assert deliver(leaf, "root", TiedCall(1, 1, ("w",), False)) == [
        ("root", TiedGradient(1, 1, (("w", 4.0),)))
    ]
    assert deliver(leaf, "root", TiedCall(1, 2, ("w",), False)) == [("root", TiedGradient(1, 2, ()))]
    assert leaf.stamp == ()


def test_steps_are_made_in_their_order() -> None:
    leaf = order("leaf")
    steps = [TiedStep(1, number, 0.1, (("w", float(number)),)) for number in (1, 2, 3)]
    assert deliver(leaf, "root", steps[2]) == []
    assert not leaf.has_seen((("root", 1),))
    assert deliver(leaf, "root", steps[0]) == [("leaf", steps[0])]
    assert leaf.has_seen((("root", 1),))
    assert deliver(leaf, "root", steps[1]) == [("leaf", steps[1]), ("leaf", steps[2])]


def test_a_stamp_of_a_home_that_was_met_holds_back_who_follows_it_and_nobody_else() -> None:
    leaf, middle = order("leaf"), order("middle", {})
    deliver(leaf, "root", holder("root"))
    assert not leaf.has_seen((("root", 1),))
    assert middle.has_seen((("root", 1),))


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        ("leaf", TiedGradient(1, 2, ())),
        ("leaf", TiedGradient(1, 0, ())),
        ("middle", TiedGradient(1, 1, ())),
    ],
)
def test_an_answer_that_was_not_called_for_is_refused_by_a_home(sender: str, message: TiedGradient) -> None:
    home = met_home()
    home.offer(0.5, {})
    assert isinstance(deliver(home, sender, message), Refusal)
    assert deliver(home, "leaf", TiedGradient(1, 1, ())) != []


def test_what_comes_twice_is_refused() -> None:
    home, leaf = order("root", {"w": (0, 5, 11)}), order("leaf")
    for node in ("middle", "leaf"):
        deliver(home, node, holder(node))
    home.offer(0.5, {})
    assert deliver(home, "leaf", TiedGradient(1, 1, ())) == []
    assert isinstance(deliver(home, "leaf", TiedGradient(1, 1, ())), Refusal)
    for message in (TiedCall(1, 1, ("w",), False), TiedStep(1, 1, 0.1, ()), TiedStep(1, 3, 0.1, ())):
        assert not isinstance(deliver(leaf, "root", message), Refusal)
        assert isinstance(deliver(leaf, "root", message), Refusal)
    assert isinstance(deliver(order("middle", {}), "leaf", holder("leaf")), Refusal)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (TiedCall(1, 1, ("v",), False), "does not share"),
        (TiedStep(1, 1, 0.1, (("v", 1.0),)), "does not share"),
        (TiedStep(1, 17, 0.1, ()), "too far ahead"),
    ],
)
def test_a_wrong_home_is_no_peer_of_ours(message: TiedCall | TiedStep, reason: str) -> None:
    leaf = order("leaf")
    with pytest.raises(ProtocolError, match=reason):
        deliver(leaf, "root", message)
    assert deliver(leaf, "root", TiedStep(1, 16, 0.1, ())) == []


def test_nobody_else_calls_or_steps_a_home_s_weight() -> None:
    home = met_home()
    with pytest.raises(ProtocolError, match="calls 'w' its own"):
        deliver(home, "leaf", TiedCall(1, 1, ("w",), False))
    with pytest.raises(ProtocolError, match="calls 'w' its own"):
        deliver(home, "leaf", TiedStep(1, 1, None, (("w", 1.0),)))
    home.offer(0.5, {})
    with pytest.raises(ProtocolError, match="which it does not hold with us"):
        deliver(home, "leaf", TiedGradient(1, 1, (("v", 1.0),)))
    with pytest.raises(ProtocolError, match="and now"):
        deliver(home, "leaf", TiedHolder(1, 7, 12, False))


def rebuilt(node: str) -> TiedOrder[float]:
    return TiedOrder(1, node, NODES, PLACES[node], {"w": (0, 11)}, is_rebuilt=True)


def test_after_a_rebuild_the_first_step_says_what_the_home_has_before_any_other() -> None:
    home = rebuilt("root")
    assert home.is_ready
    assert home.change({"w": 5.0, "exp_avg/w": 2.0, "step/w": 7.0}) == []
    assert not home.is_settled
    assert home.offer(0.5, {"w": 3.0}) == []
    made = deliver(home, "leaf", holder("leaf"))
    values = (("w", 5.0), ("exp_avg/w", 2.0), ("step/w", 7.0))
    assert made[:2] == [(node, TiedStep(1, 1, None, values)) for node in ("root", "leaf")]
    assert [type(message) for _, message in made[2:]] == [TiedCall]


def test_after_a_rebuild_a_follower_is_ready_when_it_has_heard_the_home() -> None:
    leaf = rebuilt("leaf")
    assert leaf.homes == frozenset()
    assert not leaf.is_ready
    later = TiedStep(1, 2, 0.5, (("w", 1.0),))
    first = TiedStep(1, 1, None, (("w", 5.0), ("exp_avg/w", 2.0)))
    assert deliver(leaf, "root", later) == []
    assert not leaf.is_ready
    with pytest.raises(ProtocolError, match="does not share"):
        deliver(leaf, "root", TiedStep(1, 1, None, (("exp_avg/other", 5.0),)))
    assert deliver(leaf, "root", first) == [("leaf", first), ("leaf", later)]
    assert leaf.is_ready
    assert leaf.is_settled
