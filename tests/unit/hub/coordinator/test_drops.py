"""Dropped samples: each microbatch is told, who is at fault is found once, and what is kept is bounded."""

from dataclasses import replace

from support.hub_world import HubWorld, Trouble, check_replay, job

from ravnest.hub.coordinator.events import InspectSamples, Notify, SamplesInspected, SendFields
from ravnest.hub.coordinator.notice_texts import show_notice
from ravnest.hub.coordinator.notices import EpochDone, MicrobatchDropped, SamplesDropped
from ravnest.hub.coordinator.progress import DroppedSamples, Drops


def dropped(*samples, number=0, is_evaluation=False):
    return MicrobatchDropped(number, "bob", "forward: Target 5 is out of bounds", samples, is_evaluation)


def inspected(*samples, faulty=(), is_evaluation=False):
    return SamplesInspected(is_evaluation, samples, faulty, 0.0)


def test_the_sample_at_fault_is_named_in_place_of_its_microbatch():
    drops, told = Drops(), dropped(3, 178, 9)
    assert drops.record(told) == [Notify(told), InspectSamples(False, (3, 178, 9))]
    assert drops.found == (DroppedSamples((3, 178, 9), told.reason),)
    faulty = ((178, "Target 5 is out of bounds"),)
    assert drops.conclude(inspected(3, 178, 9, faulty=faulty)) == [
        Notify(SamplesDropped((178,), "Target 5 is out of bounds"))
    ]
    assert drops.found == (DroppedSamples((178,), "Target 5 is out of bounds"),)
    again = dropped(178, 4, 5)
    known = replace(again, faulty=(178,))
    assert drops.record(again) == [Notify(known)], "it was on its way already"
    assert show_notice(known).startswith("microbatch 0 (with sample 178 of the train data again) dropped")
    assert drops.conclude(inspected(3, 178, 9)) == "nobody asked about these samples"


def test_from_then_on_another_sample_of_the_microbatch_takes_its_place():
    drops = Drops()
    drops.record(dropped(3, 178, 9))
    batches = ((1, 178, 3), (178, 9), (178,), (4, 5))
    order = SendFields(1, 1, False, 0, batches, ())
    assert drops.replace_faulty(order) is order
    drops.conclude(inspected(3, 178, 9, faulty=((178, "?"), (9, "?"))))
    assert drops.replace_faulty(order).samples == ((1, 3, 3), (178, 9), (178,), (4, 5))
    evaluation = replace(order, is_evaluation=True)
    assert drops.replace_faulty(evaluation) is evaluation


def test_what_only_a_peer_says_of_a_sample_is_not_replaced():
    drops = Drops()
    drops.record(dropped(7))
    order = SendFields(1, 1, False, 0, ((7, 8),), ())
    assert drops.replace_faulty(order) is order


def test_a_microbatch_of_one_needs_no_inspection():
    drops, told = Drops(), dropped(7, is_evaluation=True)
    assert drops.record(told) == [Notify(told), Notify(SamplesDropped((7,), told.reason, True))]
    assert drops.found == (DroppedSamples((7,), told.reason, True),)
    assert drops.record(dropped(7, 8))[1:] == [InspectSamples(False, (7, 8))], "of other data"


def test_samples_of_one_fault_are_told_in_one_sentence():
    drops = Drops()
    drops.record(dropped(1, 2, 3, 4))
    told = drops.conclude(inspected(1, 2, 3, 4, faulty=((1, "a"), (2, "b"), (4, "a"))))
    assert told == [Notify(SamplesDropped((1, 4), "a")), Notify(SamplesDropped((2,), "b"))]
    assert [(each.samples, each.reason) for each in drops.found] == [((1, 4), "a"), ((2,), "b")]
    assert show_notice(told[0].notice) == "samples 1, 4 of the train data were dropped: a"


def test_where_no_sample_is_at_fault_all_of_them_are_named():
    drops = Drops()
    drops.record(dropped(1, 2))
    assert drops.conclude(inspected(1, 2)) == []
    assert drops.conclude(inspected(1, 2)) == "nobody asked about these samples"
    assert [each.samples for each in drops.found] == [(1, 2)]


def test_samples_that_were_not_asked_about_are_not_named():
    drops = Drops()
    drops.record(dropped(1, 2))
    assert drops.conclude(inspected(1, 2, faulty=((77, "?"),))) == []


def test_what_is_kept_and_inspected_is_bounded():
    drops = Drops()
    asked = [
        action
        for number in range(500)
        for action in drops.record(dropped(2 * number, 2 * number + 1, number=number))
        if isinstance(action, InspectSamples)
    ]
    assert len(asked) == 32
    assert len(drops.found) == 100


def test_a_dropped_microbatch_is_told_with_the_samples_it_had():
    world = HubWorld(job(), Trouble(dropped=0.3, seed=3))
    world.join(*"abcde", memory_mb=300.0)
    world.run()
    assert world.finish is not None
    fields = {
        order.first_microbatch + index: (samples, order.is_evaluation)
        for orders in world.answers
        for order in orders
        if isinstance(order, SendFields)
        for index, samples in enumerate(order.samples)
    }
    told = world.told(MicrobatchDropped)
    assert {each.is_evaluation for each in told} == {True, False}
    assert [(each.samples, each.is_evaluation) for each in told] == [fields[each.microbatch] for each in told]
    trained = [each for each in told if not each.is_evaluation]
    assert sum(len(each.samples) for each in trained) == sum(x.num_dropped for x in world.told(EpochDone))
    assert {each.samples for each in world.hub.drops.found} == {each.samples for each in told}
    check_replay(world)


def test_sentences_name_samples_and_data():
    assert show_notice(dropped(3)) == (
        "microbatch 0 (sample 3 of the train data) dropped by bob: forward: Target 5 is out of bounds"
    )
    many = show_notice(dropped(*range(20), is_evaluation=True))
    assert "(samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more of the validation data)" in many
    named = show_notice(SamplesDropped((178,), "Target 5 is out of bounds"))
    assert named == "sample 178 of the train data was dropped: Target 5 is out of bounds"
