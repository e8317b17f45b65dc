"""What is written reads back unchanged; junk raises ConfigError with one line and nothing else."""

import json

from hypothesis import given
from hypothesis import strategies as st
from support.plan_world import swarm_to_dict

from ravnest.errors import ConfigError
from ravnest.ids import NodeId
from ravnest.plan.files import profile_to_dict, read_profile, read_swarm
from ravnest.plan.types import ModelProfile, Node, Swarm


def between(low, high):
    return st.floats(low, high, allow_nan=False)


NAMES = st.text(max_size=64).filter(lambda name: name.isprintable() and name == name.strip())
NODES = st.builds(
    Node,
    name=NAMES.filter(bool).map(NodeId),
    memory_bytes=between(1e6, 1e15),
    flops_per_second=between(1e6, 1e18),
    upload_bytes_per_second=between(1e3, 1e12),
    download_bytes_per_second=between(1e3, 1e12),
    latency_seconds=between(0, 10),
    region=st.sampled_from(["", "eu", "us-west", "Åland", '"']),
    is_reachable=st.booleans(),
    uptime_seconds=between(60, 8.64e9),
)


@st.composite
def swarms(draw):
    nodes = draw(st.lists(NODES, min_size=1, max_size=6, unique_by=lambda node: node.name))
    regions = sorted({node.region for node in nodes})
    pairs = [(one, other) for one in regions for other in regions if one < other]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return Swarm(tuple(nodes), tuple((*pair, draw(between(0, 10))) for pair in chosen))


@st.composite
def profiles(draw):
    length = draw(st.integers(1, 5))

    def column(low, high):
        return tuple(draw(st.lists(between(low, high), min_size=length, max_size=length)))

    parameters = column(1, 1e18)
    matrices = tuple(draw(between(0, size)) for size in parameters)
    frozen = tuple(draw(between(0, size - part)) for size, part in zip(parameters, matrices, strict=True))
    frozen = frozen if any(frozen) else ()
    crossing = (draw(between(0, 1e18)), *column(1, 1e18)[1:], draw(between(0, 1e18)))
    return ModelProfile(
        name=draw(NAMES.filter(bool)),
        samples_per_batch=draw(st.integers(1, 10**6)),
        parameter_bytes=parameters,
        matrix_bytes=matrices,
        forward_flops=column(1e-3, 1e21),
        backward_flops=column(0, 1e21),
        saved_bytes=column(0, 1e18),
        crossing_bytes=crossing,
        frozen_bytes=draw(st.just(()) | st.just(frozen)),
        buffer_bytes=draw(st.just(()) | st.just(column(1, 1e18))),
    )


KEYS = st.sampled_from(
    ["node", "latency", "position", "name", "memory", "up", "between", "seconds", "crossing", "saved"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
UNITS = st.sampled_from(["8 GB", "50 Mbit/s", "20 TFLOP/s", "3 GFLOP", "12 ms", "1e999 GB", "-1 B"])
TREES = st.recursive(
    SCALARS | UNITS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(), inner, max_size=5),
    max_leaves=20,
)
TOML_PIECES = "[[node]] [node] name memory latency = [ ] { } nan 1 . , ' \" # 0x 1979-05-27 T00:00Z \\"
TOML_LIKE = st.lists(
    st.sampled_from([*TOML_PIECES.split(), "\n", " ", '"8 GB"', "'''", "\ud800"]), max_size=30
).map("".join)


def read_junk(text):
    for where in ("junk.toml", "junk.json"):
        for read in (read_swarm, read_profile):
            message = refusal(read, text, where)
            assert message is None or (where in message and "\n" not in message)


def refusal(read, text, where):
    try:
        read(text, where)
    except ConfigError as error:
        return str(error)
    return None


@given(swarms())
def test_a_swarm_reads_back(swarm):
    assert read_swarm(json.dumps(swarm_to_dict(swarm)), "swarm.json") == swarm


@given(profiles())
def test_a_profile_reads_back(profile):
    assert read_profile(json.dumps(profile_to_dict(profile)), "model.json") == profile


@given(st.text() | TOML_LIKE)
def test_junk_text_raises_config_error_only(text):
    read_junk(text)


@given(TREES)
def test_junk_trees_raise_config_error_only(tree):
    read_junk(json.dumps(tree))


@given(st.lists(st.dictionaries(KEYS, SCALARS | UNITS), min_size=1, max_size=3), KEYS)
def test_almost_right_files_raise_config_error_only(entries, key):
    read_junk(json.dumps({key: entries, "node": entries, "position": entries, "latency": entries}))
