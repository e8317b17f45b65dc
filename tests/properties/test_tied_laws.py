"""Laws of tied weights: all copies go through the same steps in the same order, and no gradient is lost."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.averaging.tied import TiedOrder
from ravnest.protocol.averaging import TiedHolder, TiedStep
from ravnest.protocol.messages import Refusal
from tests.support.tied_order import deliver


class Tokens:
    """A gradient that remembers what it is made of; not every sum of them is the same."""

    def __init__(self, *tokens: object) -> None:
        self.tokens = tokens

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(*self.tokens, *other.tokens)

    def __truediv__(self, divisor: int) -> "Tokens":
        assert divisor > 1
        return self


class TiedWorld:
    """Stages of one cluster; messages arrive in any order, some twice; who is not built yet gets none."""

    def __init__(self, num_stages: int, uses: list[set[int]], seed: int) -> None:
        self.random = Random(seed)
        self.nodes = tuple(f"n{index}" for index in range(num_stages))
        self.uses = {f"w{index}": tuple(sorted(places)) for index, places in enumerate(uses)}
        self.orders: dict[str, TiedOrder[Tokens]] = {}
        self.made: dict[tuple[str, str], list[TiedStep]] = {}
        self.under_way: list[tuple[str, str, object]] = []
        self.offered: list[tuple[str, int]] = []

    def held(self, node: str) -> dict[str, tuple[int, ...]]:
        place = self.nodes.index(node)
        return {name: places for name, places in self.uses.items() if place in places and len(places) > 1}

    def build(self, node: str) -> None:
        place, uses = self.nodes.index(node), self.held(node)
        self.orders[node] = TiedOrder(1, node, self.nodes, (place, place + 1), uses)
        self.made |= {(node, name): [] for name in uses}
        if uses:
            self.take(node, self.orders[node].hello())

    def take(self, node: str, addressed: list) -> None:
        for receiver, message in addressed:
            if receiver == node:
                for name, value in message.values:
                    self.made[node, name].append((message.number, message.rate, value.tokens))
            else:
                self.under_way.append((node, receiver, message))

    def offer(self, node: str, share: float = 0.7) -> None:
        gradients = {}
        for name in self.held(node):
            if self.random.random() < share:
                token = (name, node, len(self.offered))
                self.offered.append(token)
                gradients[name] = Tokens(token)
        self.take(node, self.orders[node].offer(float(len(self.offered)), gradients))

    def change(self, node: str) -> None:
        place = self.nodes.index(node)
        home = [name for name, places in self.held(node).items() if places[0] == place]
        self.take(node, self.orders[node].change({name: Tokens("round") for name in home}))

    def deliver(self) -> None:
        sender, receiver, message = self.under_way.pop(self.random.randrange(len(self.under_way)))
        if receiver not in self.orders:
            assert isinstance(message, TiedHolder), "others are sent only to who has said hello"
            return
        for is_again in (False, *[True] * (self.random.random() < 0.2)):
            found = deliver(self.orders[receiver], sender, message)
            if isinstance(found, Refusal):
                assert is_again or not self.held(receiver), found
            elif is_again and not isinstance(message, TiedHolder):
                raise AssertionError(f"{message} was taken twice")
            else:
                self.take(receiver, found)

    def check_prefixes(self) -> None:
        for name, places in self.uses.items():
            copies = [
                self.made[self.nodes[place], name]
                for place in places
                if (self.nodes[place], name) in self.made
            ]
            if len(copies) == len(places) > 1:
                assert all(copy == copies[0][: len(copy)] for copy in copies[1:])

    def drain(self) -> None:
        while self.under_way:
            self.deliver()
            self.check_prefixes()


@settings(max_examples=150)
@given(
    st.integers(2, 4),
    st.lists(st.sets(st.integers(0, 3), min_size=2), min_size=1, max_size=3),
    st.integers(0, 2**32),
    st.lists(st.sampled_from(["offer", "offer", "deliver", "deliver", "deliver", "change"]), max_size=60),
)
def test_copies_make_the_same_steps_and_every_gradient_counts_once(
    num_stages: int, uses: list[set[int]], seed: int, history: list[str]
) -> None:
    world = TiedWorld(num_stages, [{place % num_stages for place in places} for places in uses], seed)
    for node in world.random.sample(world.nodes, num_stages):
        world.build(node)
        if world.under_way and world.random.random() < 0.5:
            world.deliver()
    num_changes = 0
    for event in history:
        if event == "offer":
            world.offer(world.random.choice(world.nodes))
        elif event == "change" and num_changes < 8:
            num_changes += 1
            world.change(world.random.choice(world.nodes))
        elif event == "deliver" and world.under_way:
            world.deliver()
        world.check_prefixes()
    world.drain()
    for node in world.nodes:  # what the others have gathered since the last call
        world.offer(node, share=0.0)
    world.drain()
    assert all(order.is_settled for order in world.orders.values())
    for name, places in world.uses.items():
        copies = [world.made.get((world.nodes[place], name)) for place in places]
        assert all(copy == copies[0] for copy in copies)
    homes = {name: world.nodes[places[0]] for name, places in world.uses.items() if len(places) > 1}
    counted = [t for name, node in homes.items() for step in world.made[node, name] for t in step[2]]
    assert Counter(token for token in counted if token != "round") == Counter(world.offered)


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_a_stage_has_seen_a_stamp_when_its_copy_is_as_far(seed: int, num_offers: int) -> None:
    world = TiedWorld(3, [{0, 1, 2}], seed)
    for node in world.nodes:
        world.build(node)
    world.drain()
    for _ in range(num_offers):
        for node in reversed(world.nodes):
            world.offer(node, share=1.0)
        for _ in range(world.random.randrange(8)):
            if world.under_way:
                world.deliver()
    home = world.orders["n0"]
    for node in ("n1", "n2"):
        is_as_far = len(world.made[node, "w0"]) == len(world.made["n0", "w0"])
        assert world.orders[node].has_seen(home.stamp) == is_as_far
    assert world.orders["n1"].stamp == ()
