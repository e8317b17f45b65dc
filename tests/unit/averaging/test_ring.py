"""One ring: small cases by hand, failures and refusals."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from support.ring_world import make_ring, mean_of, run_ring

from ravnest.averaging.ring import choose_chunk_size, choose_least_chunk
from ravnest.config import WireFormat
from ravnest.protocol.averaging import RingPart
from ravnest.protocol.messages import Refusal


def test_two_members_by_hand():
    first, second = make_ring([np.array([1.0, 2.0]), np.array([5.0, 6.0])], [1.0, 3.0], 1)
    (out,) = first.start()
    assert out == RingPart(1, 0, part=0, chunk=0, hops=1, weight=1.0, value=np.array([1.0]))
    back = second.receive(out)
    assert (back.hops, back.weight, back.value.tolist()) == (2, 4.0, [4.0])  # (1*1 + 3*5) / 4
    assert out.value.tolist() == [1.0]  # what was received is not written to
    assert first.receive(back) is None
    assert not first.done
    first_mean = first.receive(next(second.start()))
    assert first.done
    assert second.receive(first_mean) is None
    assert mean_of(first).tolist() == mean_of(second).tolist() == [4.0, 5.0]


def test_a_vector_shorter_than_a_chunk_starts_at_one_member_which_differs_by_segment():
    starts = []
    for segment in range(4):
        members = make_ring([np.ones(5)] * 4, [1.0] * 4, 5, segment=segment)
        starts.append([len(list(member.start())) for member in members])
    assert starts == np.eye(4).tolist()


def test_two_chunks_in_a_ring_of_four_give_everybody_as_much_to_send():
    members = make_ring([np.ones(10)] * 4, [1.0] * 4, 5)
    delivered = run_ring(members, Random(0))
    assert sorted(receiver for receiver, _ in delivered) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_part_travels_in_chunks():
    members = make_ring([np.arange(10.0)] * 2, [1.0, 1.0], chunk_size=2)
    assert [(part.chunk, len(part.value)) for part in members[0].start()] == [(0, 2), (1, 2), (2, 1)]


def test_a_ring_of_one_keeps_its_own_vector():
    vector = np.array([0.1, 0.2, 0.3])
    (alone,) = make_ring([vector], [3.0], 2)
    assert list(alone.start()) == []
    assert mean_of(alone).tolist() == vector.tolist()
    assert not any(np.shares_memory(piece, vector) for piece in alone.pieces)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_fewer_elements_than_members(length):
    members = make_ring([np.full(length, float(x)) for x in range(4)], [1.0] * 4, 3)
    run_ring(members, Random(0))
    assert all(mean_of(member).tolist() == [1.5] * length for member in members)


def test_a_member_without_samples_still_gets_the_mean():
    members = make_ring([np.ones(4), np.full(4, 9.0)], [2.0, 0.0], 1)
    run_ring(members, Random(0))
    assert mean_of(members[1]).tolist() == [1.0] * 4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_weight_at_all_fails_with_a_reason(size):
    members = make_ring([np.ones(6)] * size, [0.0] * size, 2)
    run_ring(members, Random(0))
    assert all("total weight of 0.0" in member.failure for member in members)
    assert not any(member.done for member in members)


def test_weights_that_overflow_fail_with_a_reason():
    members = make_ring([np.zeros(2)] * 2, [1.5e308] * 2, 1)
    run_ring(members, Random(0))
    assert all("total weight of inf" in member.failure for member in members)


def test_the_mean_is_not_to_be_had_before_it_is_done():
    member = make_ring([np.ones(4)] * 2, [1.0, 1.0], 2)[0]
    with pytest.raises(AssertionError, match="before the ring was done"):
        _ = member.pieces


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"round_id": 2}, "another ring"),
        ({"segment": 1}, "another ring"),
        ({"part": 1}, "not awaited"),
        ({"part": -1}, "not awaited"),
        ({"part": 3}, "not awaited"),
        ({"chunk": 2}, "not awaited"),
        ({"chunk": -1}, "not awaited"),
        ({"hops": 0}, "not awaited"),
        ({"hops": 2}, "not awaited"),
        ({"hops": 4}, "not awaited"),
        ({"value": np.ones(3)}, "3 elements instead of 2"),
        ({"weight": float("nan")}, "no number of samples"),
        ({"weight": float("inf")}, "no number of samples"),
        ({"weight": -1.0}, "no number of samples"),
    ],
)
def test_refusals(change, reason):
    members = make_ring([np.ones(12)] * 3, [1.0] * 3, 2)
    part = next(members[0].start())
    refusal = members[1].receive(replace(part, **change))
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason
    assert isinstance(members[1].receive(part), RingPart)  # the true one is still welcome
    assert isinstance(members[1].receive(part), Refusal)  # but only once


def test_no_chunk_reaches_across_an_edge():
    vectors = [np.arange(20.0), np.arange(20.0) + 2]
    members = make_ring(vectors, [1.0, 1.0], chunk_size=8, edges=(0, 3, 12, 12))
    sizes = [len(part.value) for member in members for part in member.start()]
    assert sizes == [3, 7, 2, 8]
    members = make_ring(vectors, [1.0, 1.0], chunk_size=8, edges=(3, 12))
    run_ring(members, Random(0))
    assert mean_of(members[1]).tolist() == (np.arange(20.0) + 1).tolist()


def test_a_part_that_is_not_finite_ends_the_ring_and_tells_who_sent_it():
    members = make_ring([np.array([np.nan, 1.0])] * 2, [1.0, 1.0], 2)
    assert members[1].receive(next(members[0].start())) is None
    assert members[1].failure == "segment 0: what came is not finite"
    assert members[1].is_misled


def test_a_mean_has_the_same_hash_in_every_member_and_another_with_another_bit():
    vectors = [np.arange(9.0), np.ones(9), np.zeros(9)]
    digests = set()
    for change in (0.0, 1e-9):
        vectors[2][7] = change
        members = make_ring(vectors, [1.0] * 3, 2)
        run_ring(members, Random(1))
        found = {member.digest for member in members}
        assert len(found) == 1
        digests |= found
    assert {len(digest) for digest in digests} == {16}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("length", "num_members", "size"),
    [(0, 2, 1 << 14), (1 << 20, 4, 1 << 16), (10**6, 3, 83456), (1 << 30, 2, 1 << 18)],
)
def test_chunks_are_many_but_not_small(length, num_members, size):
    assert choose_chunk_size(length, num_members) == size


def test_on_faster_links_chunks_are_larger_but_never_over_the_most():
    assert choose_chunk_size(1 << 20, 4, 100_000) == 100_096  # whole blocks
    assert choose_chunk_size(1 << 20, 4, 1 << 30) == 1 << 18
    assert choose_chunk_size(1 << 24, 4, 100_000) == 1 << 18


@pytest.mark.parametrize(
    ("rate", "wire_format", "items"),
    [(4e6, WireFormat.FP32, 20_000), (4e6, WireFormat.BF16, 40_000), (math.inf, WireFormat.INT4, 1 << 18)],
)
def test_the_least_chunk_is_what_passes_in_a_fiftieth_of_a_second(rate, wire_format, items):
    assert choose_least_chunk(rate, wire_format) == items
