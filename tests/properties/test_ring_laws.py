"""Laws of the ring: every member gets the same weighted mean, in any delivery order, despite junk."""

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.ring_world import make_ring, mean_of, run_ring

from ravnest.protocol.messages import Refusal

sizes = st.integers(1, 6)
lengths = st.integers(0, 40)
chunk_sizes = st.integers(1, 12)
seeds = st.integers(0, 2**32)


def draw_inputs(size: int, length: int, seed: int):
    generator = np.random.default_rng(seed)
    vectors = [generator.normal(size=length) for _ in range(size)]
    weights = [float(weight) for weight in generator.integers(0, 5, size)]
    weights[generator.integers(size)] += 1.0
    return vectors, weights


@given(sizes, lengths, chunk_sizes, seeds)
def test_every_member_gets_the_weighted_mean(size, length, chunk_size, seed):
    vectors, weights = draw_inputs(size, length, seed)
    copies = [vector.copy() for vector in vectors]
    members = make_ring(vectors, weights, chunk_size, segment=seed % 9)
    run_ring(members, Random(seed))
    assert all(member.done and member.failure is None for member in members)
    means = [mean_of(member) for member in members]
    np.testing.assert_allclose(means[0], np.average(copies, axis=0, weights=weights), rtol=1e-12)
    assert all(mean.tobytes() == means[0].tobytes() for mean in means)
    assert all((old == new).all() for old, new in zip(copies, vectors, strict=True))


@given(sizes, lengths, chunk_sizes, seeds)
def test_traffic_is_2n_minus_2_parts_of_at_most_a_chunk(size, length, chunk_size, seed):
    vectors, weights = draw_inputs(size, length, seed)
    delivered = run_ring(make_ring(vectors, weights, chunk_size, segment=seed % 9), Random(seed))
    assert sum(len(part.value) for _, part in delivered) == 2 * (size - 1) * length
    assert all(1 <= len(part.value) <= chunk_size for _, part in delivered)


@given(sizes, lengths, chunk_sizes, seeds)
def test_delivery_order_does_not_change_a_bit(size, length, chunk_size, seed):
    vectors, weights = draw_inputs(size, length, seed)
    results = []
    for order in range(3):
        members = make_ring(vectors, weights, chunk_size, segment=seed % 9)
        run_ring(members, Random(seed + order))
        results.append(mean_of(members[0]).tobytes())
    assert len(set(results)) == 1


@given(st.integers(2, 7), lengths.filter(bool), chunk_sizes, seeds)
def test_who_is_behind_a_cut_link_waits_for_the_earliest_hop(size, length, chunk_size, seed):
    vectors, weights = draw_inputs(size, length, seed)
    members, silent = make_ring(vectors, weights, chunk_size, segment=seed % 9), seed % size
    under_way = [(k, part) for k, member in enumerate(members) for part in member.start()]
    while under_way:
        sender, part = under_way.pop(Random(seed).randrange(len(under_way)))
        if sender != silent:
            receiver = (sender + 1) % size
            passed_on = members[receiver].receive(part)
            under_way += [] if passed_on is None else [(receiver, passed_on)]
    waits = {k: member.first_missing[0] for k, member in enumerate(members) if member.first_missing}
    behind = (silent + 1) % size
    assert all(waits[behind] < hops for k, hops in waits.items() if k != behind)


def spoil(part, random: Random):
    """Change what a receiver can see to be wrong."""
    return replace(
        part,
        **random.choice(
            [
                {"round_id": part.round_id + random.choice([-1, 1])},
                {"segment": part.segment + random.choice([-1, 1])},
                {"part": part.part + random.choice([-50, -1, 1, 50])},
                {"chunk": random.choice([-1, 1000])},
                {"hops": part.hops + random.choice([-50, -1, 1, 50])},
                {"weight": random.choice([float("nan"), float("inf"), -float("inf"), -1.0])},
                {"value": np.full(len(part.value) + random.choice([-1, 1]), 1e9)},
            ]
        ),
    )


@given(sizes, lengths, chunk_sizes, seeds)
def test_junk_and_second_copies_never_change_the_result(size, length, chunk_size, seed):
    vectors, weights = draw_inputs(size, length, seed)
    random = Random(seed)
    members = make_ring(vectors, weights, chunk_size, segment=seed % 9)
    delivered = []

    def meddle(receiver, part):
        assert isinstance(members[receiver].receive(spoil(part, random)), Refusal)
        if delivered:
            old_receiver, old = random.choice(delivered)
            assert isinstance(members[old_receiver].receive(old), Refusal)
        delivered.append((receiver, part))  # taken right after this call

    run_ring(members, random, meddle)
    quiet = make_ring(vectors, weights, chunk_size, segment=seed % 9)
    run_ring(quiet, Random(0))
    expected = mean_of(quiet[0]).tobytes()
    assert all(mean_of(member).tobytes() == expected for member in members)
