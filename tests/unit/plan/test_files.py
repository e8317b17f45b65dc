"""Nodes and profile files: what reads, and one sentence with file, key and value for what does not."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from ravnest.errors import ConfigError
from ravnest.ids import NodeId
from ravnest.plan.files import read_profile, read_swarm
from ravnest.plan.types import ModelProfile, Node, Swarm

ROOT = Path(__file__).parents[3]
NODE = {"name": "ana", "memory": "10 GB", "compute": "20 TFLOP/s", "up": "44 Mbit/s", "down": 25e6}
PARTS = [
    {"name": "body", "parameters": "8 MB", "forward": "1 GFLOP", "saved": 4e6, "crossing": "1 MB"},
    {"parameters": 400, "matrices": 300, "forward": 5, "backward": 6, "saved": 7},
]
PROFILE = {"name": "tiny", "samples_per_batch": 4, "input": "64 B", "labels": 32, "position": PARTS}
TOML = """
[[node]]
name = "ana"
memory = "10 GB"
compute = "20 TFLOP/s"
up = "44 Mbit/s"
down = "200 Mbit/s"
region = "eu"

[[node]]
name = "bob"
memory = "5 GB"
compute = "6 TFLOP/s"
up = "20 Mbit/s"
down = "100 Mbit/s"
latency = "12 ms"
region = "us"
reachable = false
uptime = "3 days"

[[latency]]
between = ["eu", "us"]
seconds = "45 ms"
"""


def swarm_of(*nodes, latency=()):
    return read_swarm(json.dumps({"node": nodes, "latency": latency}), "swarm.json")


def profile_of(**changes):
    return read_profile(json.dumps({**PROFILE, **changes}), "model.json")


def refusal(read, *args, **kwargs):
    with pytest.raises(ConfigError) as error:
        read(*args, **kwargs)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_reads_a_nodes_file():
    ana = Node(NodeId("ana"), 10e9, 20e12, 5.5e6, 25e6, region="eu")
    bob = Node(NodeId("bob"), 5e9, 6e12, 2.5e6, 12.5e6, 0.012, "us", False, 3 * 86400.0)
    swarm = Swarm((ana, bob), (("eu", "us", 0.045),))
    assert read_swarm(TOML, "swarm.toml") == swarm
    assert read_swarm(json.dumps(tomllib.loads(TOML)), "SWARM.JSON") == swarm
    assert read_swarm("\ufeff" + TOML, "swarm.toml") == swarm


def test_reads_a_profile_file():
    assert profile_of() == ModelProfile(
        name="tiny",
        samples_per_batch=4,
        parameter_bytes=(8e6, 400.0),
        matrix_bytes=(0.0, 300.0),
        forward_flops=(1e9, 5.0),
        backward_flops=(2e9, 6.0),
        saved_bytes=(4e6, 7.0),
        crossing_bytes=(64.0, 1e6, 32.0),
    )


def test_reads_what_is_frozen_and_buffers():
    profile = profile_of(position=[PARTS[0], {**PARTS[1], "frozen": 100, "buffers": 8, "restored": 9}])
    assert (profile.frozen_bytes, profile.buffer_bytes) == ((0.0, 100.0), (0.0, 8.0))
    assert profile.restored_bytes == (0.0, 9.0)
    assert profile.trained_bytes == (8e6, 300.0)
    assert profile.fixed_bytes == (0.0, 108.0)
    told = refusal(profile_of, position=[PARTS[0], {**PARTS[1], "frozen": 101}])
    assert "'frozen' is 101, more than what 'matrices' leave of 'parameters'" in told


def test_the_examples_of_the_documentation_read():
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/files.md").read_text("utf-8"), re.DOTALL)
    swarm, profile = read_swarm(blocks[0], "files.md"), read_profile(blocks[1], "files.md")
    assert [node.name for node in swarm.nodes] == ["ana-rtx3060", "bob-laptop"]
    assert profile.num_positions == 2


def test_the_example_swarm_is_as_mixed_as_it_says():
    swarm = read_swarm((ROOT / "examples/swarm.toml").read_text("utf-8"), "swarm.toml")
    assert len(swarm.nodes) == 12
    assert len({node.region for node in swarm.nodes}) == 2
    assert sum(not node.is_reachable for node in swarm.nodes) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory", -1e9),
        ("memory", 0),
        ("memory", 10),
        ("memory", "10 bananas"),
        ("memory", "8 GB/s"),
        ("memory", True),
        ("memory", None),
        ("memory", [1]),
        ("memory", {"gb": 1}),
        ("memory", float("nan")),
        ("memory", "1e400 GB"),
        ("compute", float("inf")),
        ("compute", "20"),
        ("up", "44 MHz"),
        ("down", "-1 Mbit/s"),
        ("down", "0 Mbit/s"),
        ("latency", "11 s"),
        ("latency", -0.001),
        ("uptime", 3),
        ("reachable", "yes"),
        ("reachable", 1),
        ("region", 4),
        ("region", "e\tu"),
        ("name", ""),
        ("name", " bob"),
        ("name", 7),
        ("name", "b\x1bob"),
        ("name", "\ud800"),
    ],
)
def test_a_wrong_value_of_a_node(key, value):
    message = refusal(swarm_of, NODE, {**NODE, "name": "bob", key: value})
    assert message.startswith("swarm.json: node 2")
    assert ('"bob"' in message) == (key != "name")
    assert repr(key) in message
    assert repr(value) in message


def test_a_name_that_is_too_long_is_quoted_short():
    message = refusal(swarm_of, {**NODE, "name": "n" * 5000})
    assert "swarm.json: node 1: key 'name' is 'nnn" in message
    assert "1 to 64" in message


def test_an_integer_beyond_printing():
    message = refusal(read_swarm, TOML.replace('"10 GB"', "0x" + "f" * 9000), "swarm.toml")
    assert "node 1 \"ana\": key 'memory' is an integer of 36000 bits" in message


def test_an_integer_beyond_reading():
    message = refusal(read_swarm, TOML.replace('"10 GB"', "1" * 9000), "swarm.toml")
    assert message.startswith("swarm.toml is not valid TOML")


@pytest.mark.parametrize("key", ["name", "memory", "compute", "up", "down"])
def test_a_missing_key_of_a_node(key):
    message = refusal(swarm_of, {name: value for name, value in NODE.items() if name != key})
    assert message.startswith("swarm.json: node 1")
    assert f"key {key!r} is missing; write {key} = " in message


def test_an_unknown_key_suggests_the_closest():
    message = refusal(swarm_of, {**NODE, "memroy": "9 GB"})
    assert message.startswith("swarm.json: node 1 \"ana\": key 'memroy' = '9 GB' is unknown")
    assert message.endswith("did you mean 'memory'")


def test_an_unknown_key_without_a_close_one_lists_the_known():
    message = refusal(swarm_of, {**NODE, "zzz": 1})
    assert message.endswith("known are name, memory, compute, up, down, latency, region, reachable, uptime")


def test_an_unknown_key_at_the_top():
    message = refusal(read_swarm, "nodes = 3", "swarm.toml")
    assert message == "swarm.toml: key 'nodes' = 3 is unknown; did you mean 'node'"


def test_duplicate_names():
    message = refusal(swarm_of, NODE, {**NODE, "name": "bob"}, NODE)
    assert message == "swarm.json: node 3 \"ana\": key 'name' is 'ana' as in node 1; choose another name"


@pytest.mark.parametrize(("text", "where"), [("", "a.toml"), (" \n", "a.toml"), ("", "a.json")])
def test_an_empty_file(text, where):
    assert refusal(read_swarm, text, where).startswith(f"{where} is empty")
    assert refusal(read_profile, text, where).startswith(f"{where} is empty")


@pytest.mark.parametrize("text", ["# nobody", "node = []"])
def test_no_nodes(text):
    message = refusal(read_swarm, text, "a.toml")
    assert message.startswith("a.toml: key 'node' is missing or empty; write one [[node]]")


def test_a_single_table_instead_of_a_list():
    message = refusal(read_swarm, TOML.replace("[[node]]", "[node]", 1).split("[[")[0], "a.toml")
    assert message.startswith("a.toml: key 'node' is {'compute': '20 TFLOP/s'")
    assert "write [[node]]" in message


def test_an_entry_that_is_no_table():
    message = refusal(swarm_of, NODE, "bob")
    assert message.startswith("swarm.json: key 'node' has 'bob' as entry 2; write a table")


def test_invalid_toml_names_the_line():
    message = refusal(read_swarm, '[[node]]\nname = "ana"\nmemory = 10 GB\n', "a.toml")
    assert message.startswith("a.toml is not valid TOML")
    assert "line 3" in message


def test_invalid_json_names_the_line():
    message = refusal(read_swarm, '{"node":\n [}', "a.json")
    assert message.startswith("a.json is not valid JSON")
    assert "line 2" in message


def test_a_key_set_twice_in_json():
    message = refusal(read_swarm, '{"node": [{"name": "a", "name": "b"}]}', "a.json")
    assert message.startswith("a.json is not valid JSON: key 'name' = 'b' is set twice")


def test_json_that_is_no_object():
    assert refusal(read_swarm, "[1, 2]", "a.json").startswith("a.json holds [1, 2], not an object")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"node":' * 100_000, "a.json"),
        ("[" * 100_000, "a.json"),
        ("node = " + "[" * 5_000, "a.toml"),
    ],
)
def test_deep_nesting_is_a_config_error(text, where):
    assert refusal(read_swarm, text, where).startswith(f"{where} is nested too deeply")


def test_deep_dotted_keys_are_a_config_error():
    message = refusal(read_swarm, "node" + ".a" * 3_000 + " = 1", "a.toml")
    assert message.startswith("a.toml: key 'node' is {'a': {'a'")


def test_too_many_nodes():
    text = '{"node": [' + ",".join(["0"] * 1_000_001) + "]}"
    assert "key 'node' has 1000001 entries" in refusal(read_swarm, text, "a.json")


@pytest.mark.parametrize(
    ("between", "shown"),
    [
        (["eu", "mars"], "'mars'"),
        (["eu", ["us"]], "['us']"),
        (["eu"], "['eu']"),
        (["eu", "eu"], "['eu', 'eu']"),
        ("eu-us", "'eu-us'"),
        (None, "None"),
    ],
)
def test_wrong_regions_of_a_latency(between, shown):
    nodes = [{**NODE, "region": "eu"}, {**NODE, "name": "bob", "region": "us"}]
    latency = [{"between": between, "seconds": "1 ms"}]
    message = refusal(swarm_of, *nodes, latency=latency)
    assert message.startswith("swarm.json: latency 1: key 'between' ")
    assert shown in message
    assert "'eu'" in message or '"eu"' in message


def test_a_latency_given_twice():
    extra = '[[latency]]\nbetween = ["us", "eu"]\nseconds = 1\n'
    message = refusal(read_swarm, TOML + extra, "a.toml")
    assert message.startswith("a.toml: latency 2: key 'between' = ['us', 'eu'] appears twice")


@pytest.mark.parametrize("seconds", ["45", -1, 11])
def test_a_wrong_latency(seconds):
    nodes = [{**NODE, "region": "eu"}, {**NODE, "name": "bob"}]
    message = refusal(swarm_of, *nodes, latency=[{"between": ["eu", ""], "seconds": seconds}])
    assert message.startswith("swarm.json: latency 1: key 'seconds' ")
    assert repr(seconds) in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parameters", -1),
        ("parameters", "8 GHz"),
        ("matrices", "-3 B"),
        ("forward", "1 TFLOP/s"),
        ("forward", float("nan")),
        ("backward", "x"),
        ("saved", None),
        ("crossing", 0),
        ("name", "\n"),
    ],
)
def test_a_wrong_value_of_a_position(key, value):
    message = refusal(profile_of, position=[{**PARTS[0], key: value}, PARTS[1]])
    assert message.startswith("model.json: position 1")
    assert ('"body"' in message) == (key != "name")
    assert repr(key) in message
    assert repr(value) in message


@pytest.mark.parametrize("key", ["parameters", "forward", "saved", "crossing"])
def test_a_missing_key_of_a_position(key):
    part = {name: value for name, value in PARTS[0].items() if name != key}
    message = refusal(profile_of, position=[part, PARTS[1]])
    assert message.startswith(f'model.json: position 1 "body": key {key!r} is missing')


@pytest.mark.parametrize("key", ["name", "samples_per_batch", "input", "labels", "position"])
def test_a_missing_key_of_a_profile(key):
    text = json.dumps({name: value for name, value in PROFILE.items() if name != key})
    message = refusal(read_profile, text, "model.json")
    assert message.startswith(f"model.json: key {key!r} is missing")


@pytest.mark.parametrize("value", [0, -4, 2.5, "8", True, 10**7])
def test_wrong_samples_per_batch(value):
    message = refusal(profile_of, samples_per_batch=value)
    assert message.startswith(f"model.json: key 'samples_per_batch' is {value!r}")


def test_an_unknown_key_of_a_position():
    message = refusal(profile_of, position=[{**PARTS[1], "save": 1}])
    assert message.startswith("model.json: position 1: key 'save' = 1 is unknown")
    assert message.endswith("did you mean 'saved'")


def test_crossing_after_the_last_position():
    message = refusal(profile_of, position=[PARTS[0]])
    assert message.startswith("model.json: position 1 \"body\": key 'crossing' ")
    assert "'1 MB'" in message
    assert "'labels'" in message


def test_more_matrices_than_parameters():
    message = refusal(profile_of, position=[{**PARTS[1], "matrices": "1 kB"}])
    assert message.startswith("model.json: position 1: key 'matrices' is '1 kB'")


def test_a_model_without_parameters():
    message = refusal(profile_of, position=[{"parameters": 0, "forward": 1, "saved": 1}])
    assert message.startswith("model.json: key 'position' has no entry with parameters above 0")


def test_too_many_positions():
    message = refusal(profile_of, position=[0] * 20_001)
    assert message.startswith("model.json: key 'position' has 20001 entries")
