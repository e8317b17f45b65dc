"""Synthetic swarms for planning and simulation without real nodes: "home:50", "lan:8", ...

The one idea: a kind of population is a small table of link technologies, regions and medians; nodes
are drawn from it, and from one table of consumer devices, by a seeded generator. The same spec and
seed give the same swarm. docs/files.md lists the sources.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ravnest.errors import ConfigError
from ravnest.ids import NodeId
from ravnest.plan.types import DAY_SECONDS, Node, Swarm
from ravnest.units import show_value

_Floats = NDArray[np.float64]

_MEGABIT = 1e6 / 8
_LARGEST = 1_000_000
_USABLE_MEMORY = 0.85  # the rest belongs to the desktop
_SPEED_SPREAD = 0.3  # sigma of ln(speed) within a device class
_LATENCY_SPREAD = 0.3
_DOWN_SPREAD = 0.2
_UPTIME_SPREAD = 1.0
_SHORTEST_UPTIME, _LONGEST_UPTIME = 3600.0, 60 * DAY_SECONDS
_SPEC = re.compile(r"([a-z]+):([0-9]{1,7})")


def population(spec: str, seed: int) -> Swarm:
    """Return the swarm that `spec` ("home:50") and `seed` name."""
    kind_name, count = _read_spec(spec)
    if seed < 0:
        raise ConfigError(f"seed {seed} is negative; choose 0 or more")
    kind = _KINDS[kind_name]
    draw = np.random.default_rng(seed)
    memory, speed = _draw_devices(draw, count)
    upload, download, latency = _draw_links(draw, kind.links, count)
    region = draw.choice(len(kind.regions), count, p=_shares([r.share for r in kind.regions]))
    reachable = draw.random(count) < kind.reachable_share
    uptime = kind.median_uptime_days * DAY_SECONDS * draw.lognormal(0, _UPTIME_SPREAD, count)
    columns = zip(
        _names(kind_name, count),
        memory.tolist(),
        speed.tolist(),
        (upload * _MEGABIT).tolist(),
        (download * _MEGABIT).tolist(),
        (latency / 1e3).tolist(),
        [kind.regions[index].name for index in region],
        reachable.tolist(),
        np.clip(uptime, _SHORTEST_UPTIME, _LONGEST_UPTIME).tolist(),
        strict=True,
    )
    return Swarm(
        nodes=tuple(Node(*row) for row in columns),
        region_latency=tuple(_latencies(kind.regions, set(region.tolist()))),
    )


def _read_spec(spec: str) -> tuple[str, int]:
    match = _SPEC.fullmatch(spec)
    if match is None or match[1] not in _KINDS or not 1 <= int(match[2]) <= _LARGEST:
        kinds = ", ".join(KINDS)
        raise ConfigError(
            f"{show_value(spec)} is not a population; write KIND:COUNT like 'home:50',"
            f" with KIND one of {kinds} and COUNT from 1 to {_LARGEST}"
        )
    return match[1], int(match[2])


def _names(kind: str, count: int) -> list[NodeId]:
    digits = max(4, len(str(count)))
    return [NodeId(f"{kind}-{number:0{digits}}") for number in range(1, count + 1)]


def _shares(weights: Sequence[float]) -> _Floats:
    return np.array(weights) / sum(weights)


def _draw_devices(draw: np.random.Generator, count: int) -> tuple[_Floats, _Floats]:
    """Return memory in bytes and speed in FLOP/s."""
    gigabytes, shares, teraflops = np.array(_DEVICES).T
    device = draw.choice(len(_DEVICES), count, p=_shares(shares.tolist()))
    speed = teraflops[device] * 1e12 * draw.lognormal(0, _SPEED_SPREAD, count)
    return gigabytes[device] * 1e9 * _USABLE_MEMORY, speed


def _draw_links(
    draw: np.random.Generator, links: "tuple[_Link, ...]", count: int
) -> tuple[_Floats, _Floats, _Floats]:
    """Return upload and download in Mbit/s and one-way latency in milliseconds."""
    link = draw.choice(len(links), count, p=_shares([link.share for link in links]))

    def column(name: str) -> _Floats:
        return np.array([getattr(one, name) for one in links])[link]

    upload = column("upload") * np.exp(column("spread") * draw.standard_normal(count))
    upload = np.clip(upload, column("slowest"), column("fastest"))
    download = upload * column("down_ratio") * draw.lognormal(0, _DOWN_SPREAD, count)
    download = np.clip(download, np.maximum(upload, 5.0), column("fastest"))
    latency = column("latency") * draw.lognormal(0, _LATENCY_SPREAD, count)
    return upload, download, latency


def _latencies(regions: "tuple[_Region, ...]", present: set[int]) -> Iterator[tuple[str, str, float]]:
    for one, region in enumerate(regions):
        for other, round_trip in enumerate(region.round_trips, one + 1):
            if one in present and other in present:
                yield region.name, regions[other].name, round_trip / 2e3


@dataclass(frozen=True, slots=True)
class _Link:
    """A technology of the last mile: Mbit/s, and milliseconds one way to the region's exchange."""

    share: float
    upload: float  # median
    spread: float  # sigma of ln(upload)
    down_ratio: float
    latency: float
    slowest: float = 1.0
    fastest: float = 1000.0


@dataclass(frozen=True, slots=True)
class _Region:
    name: str
    share: float
    round_trips: tuple[float, ...]  # milliseconds to the regions listed after this one


@dataclass(frozen=True, slots=True)
class _Kind:
    links: tuple[_Link, ...]
    regions: tuple[_Region, ...]
    reachable_share: float
    median_uptime_days: float


# Memory in GB, share, TFLOP/s that training reaches; the first is a PC without a usable GPU.
_DEVICES = (
    (16.0, 0.13, 0.4),
    (4.0, 0.09, 2.0),
    (6.0, 0.104, 6.0),
    (8.0, 0.337, 16.0),
    (10.5, 0.05, 20.0),
    (12.0, 0.19, 20.0),
    (16.0, 0.075, 32.0),
    (24.0, 0.024, 50.0),
)
_WORLD = (
    _Region("oregon", 0.13, (67, 49, 96, 124, 163, 139, 136, 143, 124)),
    _Region("virginia", 0.16, (11, 143, 172, 230, 197, 76, 90, 67)),
    _Region("ohio", 0.10, (130, 159, 197, 185, 86, 99, 77)),
    _Region("tokyo", 0.10, (34, 73, 100, 210, 223, 199)),
    _Region("seoul", 0.06, (74, 148, 238, 235, 228)),
    _Region("singapore", 0.09, (92, 169, 155, 179)),
    _Region("sydney", 0.04, (262, 265, 254)),
    _Region("london", 0.12, (14, 12)),
    _Region("frankfurt", 0.13, (24,)),
    _Region("ireland", 0.07, ()),
)
_COUNTRY = (
    _Region("north", 0.3, (6, 10)),
    _Region("centre", 0.5, (6,)),
    _Region("south", 0.2, ()),
)
_KINDS = {
    "home": _Kind(
        links=(
            _Link(0.45, 150, 0.8, 1.3, latency=5),  # fibre
            _Link(0.35, 20, 0.6, 8.0, latency=9),  # cable
            _Link(0.20, 8, 0.7, 4.0, latency=15),  # DSL, fixed wireless
        ),
        regions=_WORLD,
        reachable_share=0.3,
        median_uptime_days=2,
    ),
    "fibre": _Kind((_Link(1, 300, 0.7, 1.5, latency=5, slowest=20),), _WORLD, 0.5, 2),
    "campus": _Kind((_Link(1, 400, 0.6, 1.0, latency=1, slowest=100),), _COUNTRY, 0.85, 4),
    "lan": _Kind((_Link(1, 870, 0.05, 1.0, latency=0.1, fastest=940),), (_Region("lan", 1, ()),), 1.0, 7),
}
KINDS = tuple(_KINDS)
