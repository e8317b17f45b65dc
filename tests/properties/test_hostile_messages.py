"""A message of a member is understood, refused with a reason, or ignored; it never ends the hub.

Members say what is true at first, and then what is damaged: of another kind, with other numbers, from
somebody else, too late. RAVNEST_FUZZ=100000 makes so many messages, RAVNEST_FUZZ_SEED others of them.
"""

import copy
import os
import random
import time

import pytest
from support.hub_world import HubWorld, Trouble, job
from support.mutations import damage_msgpack, no_effects

from ravnest.errors import ProtocolError
from ravnest.hub.coordinator.events import Received
from ravnest.hub.service.event_log import read_event, write_event
from ravnest.protocol.messages import Refusal, pack, unpack
from ravnest.units import show_plainly

NUM_MESSAGES = int(os.environ.get("RAVNEST_FUZZ", "3000"))
SEED = int(os.environ.get("RAVNEST_FUZZ_SEED", "0"))
MOMENTS = 12  # of a run, at which everybody begins to lie
LONGEST_SECONDS = 5.0  # of this process for one message
NAMES = "abcdef"
pytestmark = pytest.mark.timeout(3_600 if NUM_MESSAGES > 3_000 else 240)


def lived_through(seed):
    """Return a run with a death, a return and a restart of the hub, and how many events it had."""
    world = HubWorld(
        job(num_validation=8), trouble=Trouble(seed, gives_up=0.2, blames=0.5, misses=0.2, dropped=0.05)
    )
    world.join(*NAMES)
    world.kill("b", at=40.0)
    world.join("b", at=60.0)
    world.restart(at=80.0)
    return world


def damaged(rng, message, told):
    """Return another message like this one, as a peer's program could send it; or None if it is refused."""
    packed = pack(message)
    version = bytes([rng.randrange(256)]) if rng.random() < 0.02 else packed[:1]
    try:
        return unpack(version + damage_msgpack(rng, packed[1:]))
    except ProtocolError as error:
        told.add(str(error))
        return None


def test_a_hub_outlives_whatever_its_members_say():
    rng, num_understood, num_refused = random.Random(SEED), 0, 0
    kinds, told = set(), set()
    ended = lived_through(SEED)
    ended.run()
    said = [event.message for event, _ in ended.happened if isinstance(event, Received)]
    per_moment = -(-NUM_MESSAGES // MOMENTS)
    for moment in range(MOMENTS):
        world = lived_through(SEED)
        num_events = len(ended.log) * moment // MOMENTS
        world.run_until(lambda count=num_events, of=world: len(of.log) >= count)
        hub = copy.deepcopy(world.monitored)
        for number in range(per_moment):
            message = said[rng.randrange(len(said))]
            if rng.random() < 0.9:
                message = damaged(rng, message, told)
            if message is None:
                num_refused += 1
                continue
            sender, began = rng.choice([*NAMES, "nobody"]), time.process_time()
            event = Received(sender, message, world.now + number * rng.choice([0.0, 1e-3]))
            try:
                with no_effects():
                    orders = hub.apply(event)
                    read_event(*write_event(event))  # what is not refused is kept, and read after a restart
            except BaseException as error:
                error.add_note(f"moment {moment}, message {number} of {sender}: {message!r:.2000}")
                raise
            assert time.process_time() - began < LONGEST_SECONDS, message
            reasons = [order.reason for order in orders if isinstance(order, Refusal)]
            told.update(reasons)
            num_understood += not reasons
            num_refused += len(reasons)
            kinds.add(type(message))
    assert num_understood > NUM_MESSAGES // 100, "no message was good enough to be looked at"
    assert num_refused > NUM_MESSAGES // 10
    assert len(kinds) > 5, kinds
    assert [reason for reason in told if show_plainly(reason) != reason or len(reason) > 700] == []
