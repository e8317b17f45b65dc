"""Populations: the same spec and seed give the same swarm, and each kind is what it says."""

import json
from statistics import fmean, median

import pytest
from support.plan_world import swarm_to_dict

from ravnest.errors import ConfigError
from ravnest.plan.files import read_swarm
from ravnest.plan.populations import KINDS, population

MEGABIT = 1e6 / 8


@pytest.mark.parametrize("kind", KINDS)
def test_same_spec_and_seed_same_swarm(kind):
    assert population(f"{kind}:40", 7) == population(f"{kind}:40", 7)
    assert population(f"{kind}:40", 7) != population(f"{kind}:40", 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_swarm_survives_its_file(kind):
    swarm = population(f"{kind}:300", 1)
    assert read_swarm(json.dumps(swarm_to_dict(swarm)), "swarm.json") == swarm


@pytest.mark.parametrize(("count", "last"), [(7, "lan-0007"), (12345, "lan-12345")])
def test_names_sort_in_order(count, last):
    names = [node.name for node in population(f"lan:{count}", 0).nodes]
    assert len(names) == count
    assert names[-1] == last
    assert names == sorted(names)


def test_home_is_mixed_links_many_regions_and_mostly_unreachable():
    swarm = population("home:4000", 3)
    uploads = [node.upload_bytes_per_second / MEGABIT for node in swarm.nodes]
    reachable = sum(node.is_reachable for node in swarm.nodes) / len(swarm.nodes)
    cpu_only = [node for node in swarm.nodes if node.flops_per_second < 1e12]
    assert 25 < median(uploads) < 50
    assert min(uploads) < 5
    assert max(uploads) > 400
    assert 0.27 < reachable < 0.33
    assert 0.10 < len(cpu_only) / len(swarm.nodes) < 0.17
    assert all(node.memory_bytes <= 0.85 * 24e9 for node in swarm.nodes)
    assert all(node.download_bytes_per_second >= node.upload_bytes_per_second for node in swarm.nodes)
    assert 1.8 < median(node.uptime_seconds for node in swarm.nodes) / 86400 < 2.2


def test_fibre_has_about_300_mbit():
    nodes = population("fibre:2000", 3).nodes
    assert 270 < median(node.upload_bytes_per_second for node in nodes) / MEGABIT < 330


def test_lan_is_one_fast_region_where_all_are_reachable():
    swarm = population("lan:200", 3)
    assert {node.region for node in swarm.nodes} == {"lan"}
    assert swarm.region_latency == ()
    assert all(node.is_reachable for node in swarm.nodes)
    assert 1.5e-4 < 2 * median(node.latency_seconds for node in swarm.nodes) < 2.5e-4
    assert all(700 < node.upload_bytes_per_second / MEGABIT <= 940 for node in swarm.nodes)


def test_campus_is_a_country_of_good_links():
    swarm = population("campus:1000", 3)
    assert len({node.region for node in swarm.nodes}) == 3
    assert all(100 <= node.upload_bytes_per_second / MEGABIT <= 1000 for node in swarm.nodes)
    assert 0.8 < sum(node.is_reachable for node in swarm.nodes) / 1000 < 0.9


@pytest.mark.parametrize(
    ("kind", "upload", "ratio", "latency_ms", "reachable", "uptime_days"),
    [
        ("home", 35, 3.45, 7.4, 0.3, 2),
        ("fibre", 300, 1.5, 5, 0.5, 2),
        ("campus", 400, 1, 1, 0.85, 4),
        ("lan", 870, 1, 0.1, 1, 7),
    ],
)
def test_medians_are_the_documented_ones(kind, upload, ratio, latency_ms, reachable, uptime_days):
    nodes = population(f"{kind}:6000", 5).nodes
    downloads = [node.download_bytes_per_second / node.upload_bytes_per_second for node in nodes]
    uptimes = [node.uptime_seconds / 86400 for node in nodes]
    assert median(node.upload_bytes_per_second for node in nodes) / MEGABIT == pytest.approx(upload, rel=0.06)
    assert median(downloads) == pytest.approx(ratio, rel=0.06)
    assert median(node.latency_seconds for node in nodes) * 1e3 == pytest.approx(latency_ms, rel=0.06)
    assert fmean(node.is_reachable for node in nodes) == pytest.approx(reachable, abs=0.03)
    assert median(uptimes) == pytest.approx(uptime_days, rel=0.06)
    assert 1 / 24 <= min(uptimes) < max(uptimes) <= 60


@pytest.mark.parametrize(
    ("memory", "share", "teraflops"),
    [
        (4, 0.09, 2),
        (6, 0.104, 6),
        (8, 0.337, 16),
        (10.5, 0.05, 20),
        (12, 0.19, 20),
        (16, 0.13 + 0.075, None),
        (24, 0.024, 50),
    ],
)
def test_machines_are_the_documented_ones(memory, share, teraflops):
    nodes = population("home:8000", 5).nodes
    alike = [node for node in nodes if node.memory_bytes == pytest.approx(memory * 0.85e9)]
    assert len(alike) / len(nodes) == pytest.approx(share, abs=0.02)
    if teraflops is not None:
        speed = median(node.flops_per_second for node in alike) / 1e12
        assert speed == pytest.approx(teraflops, rel=0.1)


def test_latency_is_half_the_round_trip_of_every_pair_of_present_regions():
    swarm = population("home:4000", 3)
    table = {frozenset((one, other)): time for one, other, time in swarm.region_latency}
    assert len(table) == len(swarm.region_latency) == 45
    assert sum(table.values()) == pytest.approx(6148 / 2e3)
    assert table[frozenset(("oregon", "virginia"))] == pytest.approx(0.0335)
    assert table[frozenset(("seoul", "ireland"))] == pytest.approx(0.114)
    assert table[frozenset(("frankfurt", "ireland"))] == pytest.approx(0.012)


def test_absent_regions_are_left_out():
    swarm = population("home:2", 0)
    regions = {node.region for node in swarm.nodes}
    assert {name for pair in swarm.region_latency for name in pair[:2]} <= regions


@pytest.mark.parametrize(
    "spec", ["", "home", "home:", "home:0", "home:-5", "home:1e3", "moon:5", "home:1000001", "x" * 999]
)
def test_a_bad_spec_shows_the_valid_form(spec):
    with pytest.raises(ConfigError, match=r"KIND:COUNT like 'home:50'.*home, fibre, campus, lan"):
        population(spec, 0)


def test_a_negative_seed_is_refused():
    with pytest.raises(ConfigError, match="seed -1"):
        population("home:5", -1)
