"""What a provider's page knows: phases, the stage and what it is made of, work, traffic, days."""

import pytest
from support.lent_pc import DAY, USE, LentPc, build_item, plan_order, step_report

from ravnest.errors import RavnestError
from ravnest.ids import HUB
from ravnest.peer.compute_protocol import ComputeFailed, StageBuilt
from ravnest.provider.lending_documents import LendingFacts, LendingPhase
from ravnest.provider.lending_page import describe_blueprint
from ravnest.transfer.outbox import Outgoing
from ravnest.web.updates import GrowthCutter


def test_the_phase_follows_orders_and_what_the_provider_wants():
    lent = LentPc()
    recorder, phases = lent.recorder, []

    def look():
        phases.append(str(lent.document().phase))

    look()
    recorder.begin_part()
    recorder.connect()
    recorder.take_order(plan_order(stage=False))
    look()
    order = plan_order()
    recorder.take_order(order)
    look()
    recorder.take_order(build_item(order))
    recorder.take_answer(StageBuilt(order.build_id - 1))  # of a build before
    look()
    recorder.take_answer(StageBuilt(order.build_id))
    look()
    lent.facts = LendingFacts(leaving="its provider paused it", is_paused=True)
    look()
    recorder.end_part()
    lent.facts = LendingFacts(
        waits_for="its provider paused it", goes_on="after: ravnest resume", is_paused=True
    )
    look()
    lent.facts = LendingFacts(is_ending=True)
    look()
    assert phases == [
        "joining",
        "spare",
        "building",
        "building",
        "hosting",
        "leaving",
        "waiting",
        "ended",
    ]
    assert set(phases) == set(LendingPhase)


def test_a_stage_is_shown_with_its_place_and_what_it_is_made_of():
    lent = LentPc()
    lent.host()
    stage = lent.document().stage
    assert (stage.start, stage.stop, stage.place, stage.pipeline) == (2, 5, 1, ("ana", "attic", "cem"))
    assert (stage.is_built, stage.weights_bytes) == (True, 1024.0)
    program = stage.program
    assert program.num_operations == sum(each.count for each in program.operators) > 0
    counts = [each.count for each in program.operators]
    assert counts == sorted(counts, reverse=True)
    assert program.trained_bytes > 0
    assert lent.recorder.blueprint is None, "it is let go once it was looked at"


def test_weights_are_not_held_by_the_page():
    lent, order = LentPc(), plan_order()
    lent.recorder.take_order(order)
    item = build_item(order)
    lent.recorder.take_order(item)
    kept = [value for value in vars(lent.recorder).values() if value is item or value is item.contents]
    assert kept == []


def test_a_blueprint_that_cannot_be_read_is_a_sentence():
    with pytest.raises(RavnestError, match="JSON"):
        describe_blueprint(b"{}\nnonsense")
    lent, order = LentPc(), plan_order()
    lent.recorder.take_order(order)
    lent.recorder.take_order(build_item(order, b"{}\nnonsense"))
    late = lent.recorder.blueprint
    lent.recorder.describe_stage(late, None, "it is no JSON")
    assert lent.document().stage.fault == "it is no JSON"
    lent.recorder.take_order(plan_order(build_id=4))
    lent.recorder.describe_stage(late, None, "it is no JSON")
    assert lent.document().stage.fault == "", "that was another stage"


def test_work_is_counted_once_and_only_what_the_hub_is_told():
    lent = LentPc()
    lent.host()
    lent.recorder.take_answer(Outgoing(HUB, step_report(num_samples=8, idle_share=0.5)))
    lent.recorder.take_answer(Outgoing("ana", step_report(num_samples=8)))  # the root gets the same
    work = lent.document().work
    assert (work.num_microbatches, work.num_samples, work.busy) == (1, 8, 0.5)
    lent.recorder.take_answer(ComputeFailed("RavnestError", "it broke"))
    assert lent.document().phase is LendingPhase.BUILDING
    lent.recorder.end_part()
    document = lent.document()
    assert (document.stage, document.work.busy, document.work.num_samples) == (None, None, 8)


def test_rates_are_of_the_last_seconds_and_days_of_the_calendar():
    lent = LentPc()
    lent.host()
    lent.train(seconds=20, sent=1000, received=3000)
    document = lent.document()
    assert document.traffic.sent_bytes_per_second == pytest.approx(1000)
    assert document.traffic.received_bytes_per_second == pytest.approx(3000)
    assert [(each.day, each.sent_bytes, each.lent_seconds) for each in document.days] == [(DAY, 20_000, 20.0)]
    lent.recorder.sent_bytes += 5
    lent.recorder.sample(USE, lent.now + 1.0, "2026-11-18")
    days = lent.recorder.make_document(lent.facts, lent.now + 1.0, "2026-11-18").days
    assert [(each.day, each.sent_bytes) for each in days] == [(DAY, 20_000), ("2026-11-18", 5)]
    assert sum(each.num_samples for each in days) == document.work.num_samples


def test_a_page_gets_only_what_is_new():
    lent = LentPc()
    lent.host()
    lent.recorder.news.append("said", "lending", "plain", "joined as attic", 0.0)
    lent.train(3)
    cutter = GrowthCutter()
    first = cutter.cut(lent.document(), lent.recorder.news, lent.recorder.curves)
    lent.train(2)
    second = cutter.cut(lent.document(), lent.recorder.news, lent.recorder.curves)
    assert (first.is_whole, second.is_whole, second.news) == (True, False, ())
    assert [len(part.points) for part in second.curves.values()] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("facts", "can"),
    [
        (LendingFacts(), (True, False, True)),
        (LendingFacts(is_paused=True), (False, True, True)),
        (LendingFacts(is_ending=True), (False, False, False)),
    ],
)
def test_only_what_makes_sense_is_offered(facts, can):
    lent = LentPc()
    lent.facts = facts
    document = lent.document()
    assert (document.can_pause, document.can_resume, document.can_finish) == can
