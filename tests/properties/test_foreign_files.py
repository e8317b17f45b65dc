"""A foreign file or token is read, or refused with a sentence; it never ends in a traceback or runs code.

Each kind goes through the functions that the commands use. RAVNEST_FUZZ=10000 makes so many of each kind,
RAVNEST_FUZZ_SEED others.
"""

import hashlib
import io
import json
import os
import random
import resource
import sqlite3
import time
from base64 import b32decode, b32encode
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console
from support.hub_world import HubWorld, job
from support.mutations import damage_bytes, damage_json, damage_lines, damage_msgpack, no_effects
from support.sample_blueprints import middle_stage, perceptron
from support.saved_run import books_of, parts_of

from ravnest.cli.common import read_text
from ravnest.cli.lending_loop import find_running
from ravnest.cli.main import program
from ravnest.config import WireFormat, parse_plan_table, read_plan_config
from ravnest.engine.optimizers import Adam, Group, Muon, OptimizerSettings, Sgd
from ravnest.engine.train_config import AveragingRule, TrainConfig, read_train_config, write_train_config
from ravnest.errors import RavnestError
from ravnest.hub.service.event_log import EventLog, read_status
from ravnest.hub.service.guests import GuestList
from ravnest.model.blueprint.blueprint_json import read_blueprint, write_blueprint
from ravnest.model.state.shards import open_weights, write_index
from ravnest.net.identity import PREFIX, Token, new_keys, read_token, write_token
from ravnest.plan.files import read_profile, read_swarm
from ravnest.requester.checkpoint_store import MANIFEST, Checkpoints
from ravnest.requester.finetuning.merging import merge_adapter
from ravnest.requester.generation import load_writer
from ravnest.requester.run_folder import GuestFile, new_hub_file, read_hub_file, write_hub_file
from ravnest.transfer.blobs import name_blob
from ravnest.transfer.mirror import read_mirror
from ravnest.views.live import show_status, status_to_dict

NUM_INPUTS = int(os.environ.get("RAVNEST_FUZZ", "1000"))
SEED = int(os.environ.get("RAVNEST_FUZZ_SEED", "0"))
NUM_COMMANDS = 50
LONGEST_SECONDS = 5.0  # of this process for one input
MOST_GROWTH_BYTES = 400 << 20
pytestmark = pytest.mark.timeout(1_800 if NUM_INPUTS > 1_000 else 240)


def sentence(error):
    """A refusal is one line that a terminal can show."""
    text = str(error)
    assert text.isprintable(), text
    assert 10 < len(text) < 700, text
    return text


def check_all(read, inputs):
    """Read or refuse every input; return how many were read."""
    num_read, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with no_effects():
        for number, data in enumerate(inputs):
            started = time.process_time()
            try:
                read(data)
                num_read += 1
            except RavnestError as error:
                sentence(error)
            except BaseException as error:
                error.add_note(f"input {number}: {data!r:.2000}")
                raise
            assert time.process_time() - started < LONGEST_SECONDS, (number, data)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < MOST_GROWTH_BYTES
    return num_read


def many(seed, damage, *samples):
    rng = random.Random(seed + 1_000 * SEED)
    return (damage(rng, rng.choice(samples)) for _ in range(NUM_INPUTS))


# Tokens.

TOKEN = write_token(Token(("tcp://192.0.2.7:7700", "tcp://[::1]:7"), new_keys().public, b"s" * 16))


def damage_token(rng, good):
    if rng.random() < 0.4:
        return damage_bytes(rng, good.encode()).decode(errors=rng.choice(["replace", "surrogateescape"]))
    word = good.removeprefix(PREFIX).upper()
    body = b32decode(word + "=" * (-len(word) % 8))[2:-4]
    body = damage_msgpack(rng, body)[: (1 << 16) - 1]
    body = len(body).to_bytes(2, "big") + body
    sealed = body + hashlib.sha256(b"ravnest token" + body).digest()[:4]
    return PREFIX + b32encode(sealed).decode().rstrip("=").lower()


def test_tokens():
    check_all(read_token, many(1, damage_token, TOKEN))


# Files of nodes, models, settings.

ROOT = Path(__file__).parents[2]
SWARM = "\n".join((ROOT / "examples/swarm.toml").read_text("utf-8").splitlines()[:40])
PROFILE_DOCUMENT = {
    "name": "tiny",
    "samples_per_batch": 4,
    "input": "64 B",
    "labels": 32,
    "position": [
        {"name": "body", "parameters": "8 MB", "forward": "1 GFLOP", "saved": 4e6, "crossing": "1 MB"},
        {"parameters": 400, "matrices": 300, "forward": 5, "backward": 6, "saved": 7},
    ],
}
PROFILE = """name = "tiny"
samples_per_batch = 4
input = "64 B"
labels = 32
[[position]]
parameters = "8 MB"
forward = "1 GFLOP"
saved = 4e6
crossing = "1 MB"
[[position]]
parameters = 400
forward = 5
saved = 7
"""
SETTINGS = """[plan]
optimizer = "adamw"
predict_weights = false
max_lag = 3
activations = "int8"
averaging_share = 0.2
max_round_seconds = "5 min"
relay_bytes_per_second = "8 Mbit/s"
overhead_bytes = "1 GB"
"""
NODES = json.dumps(
    {"node": [{"name": "a", "memory": "9 GB", "compute": 1e12, "up": 1e6, "down": 1e6}] * 2}
).encode()


def reading_a_file(read, place):
    def written_and_read(data):
        place.write_bytes(data)
        return read(read_text(str(place), 64 << 20), str(place))

    return written_and_read


def read_settings(text, where):
    return read_plan_config(parse_plan_table(text, where) or {}, where)


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_nodes_files(tmp_path, ending):
    damaged = many(2, damage_lines, SWARM) if ending == "toml" else many(3, damage_json, NODES)
    check_all(reading_a_file(read_swarm, tmp_path / f"f.{ending}"), damaged)


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_profile_files(tmp_path, ending):
    document = json.dumps(PROFILE_DOCUMENT).encode()
    damaged = many(4, damage_lines, PROFILE) if ending == "toml" else many(5, damage_json, document)
    check_all(reading_a_file(read_profile, tmp_path / f"f.{ending}"), damaged)


def test_config_files(tmp_path):
    damaged = many(6, damage_lines, SETTINGS)
    check_all(reading_a_file(read_settings, tmp_path / "f.toml"), damaged)


# What travels to peers.


def test_blueprints():
    samples = [write_blueprint(perceptron()), write_blueprint(middle_stage())]
    assert check_all(read_blueprint, many(7, damage_json, *samples)) > 0


def test_train_configs():
    rules = [Sgd(0.9, True), Adam(), Muon(precision="auto")]
    groups = tuple(Group((f"w{index}",), rule, 0.1) for index, rule in enumerate(rules))
    averaging = AveragingRule(True, 0.7, 0.9, 3.0)
    full = TrainConfig(
        OptimizerSettings(groups, 0.1, 1.0), 64, deltas=WireFormat.INT8, max_lag=2, averaging=averaging
    )
    good = write_train_config(full, frozenset({"w0", "w1", "w2"}))
    assert check_all(read_train_config, many(8, damage_json, good)) > 0


# Weights that a requester begins with.

MIRRORED = {"url": "https://example.org/a.safetensors", "start": 88, "dtype": "float32", "shape": [2, 3]}
MIRROR = {"tensors": {name: MIRRORED | {"hash": name * 64} for name in "ab"}}


def test_mirror_lists(tmp_path):
    def written_and_read(data):
        (tmp_path / "mirror.json").write_bytes(data)
        return read_mirror(tmp_path / "mirror.json")

    assert check_all(written_and_read, many(20, damage_json, json.dumps(MIRROR).encode())) > 0


@pytest.mark.parametrize("what", ["index", "shard"])
def test_shards(tmp_path, what):
    part = parts_of(1)[0][2]
    (tmp_path / "a.safetensors").write_bytes(part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(write_index({"tied": "a.safetensors"}, 48))
    damaged = index if what == "index" else tmp_path / "a.safetensors"
    good = damaged.read_bytes()

    def written_and_read(data):
        damaged.write_bytes(data)
        for tensor in open_weights(tmp_path):
            bytes(tensor.buffer)

    damage = damage_json if what == "index" else damage_bytes
    assert check_all(written_and_read, many(21, damage, good)) > 0
    num_read = check_all(lambda _: open_weights(tmp_path), in_place_of_a_file(damaged))
    assert num_read <= (3 if what == "index" else 0)  # without an index, the only file is taken


# Adapters.

ADAPTER = {
    "base_model_name_or_path": "a-base",
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8.0,
    "bias": "none",
    "rank_pattern": {},
    "target_modules": ["q_proj", "v_proj"],
}


@pytest.mark.parametrize("use", ["generate", "merge"])
def test_adapters(tmp_path, monkeypatch, use):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)  # where a name in the file might be one of a folder
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    for number, folder in enumerate((adapter, base)):
        folder.mkdir()
        name = "adapter_model.safetensors" if folder is adapter else "model.safetensors"
        (folder / name).write_bytes(parts_of(1)[number][2])

    def written_and_used(data):
        (adapter / "adapter_config.json").write_bytes(data)
        if use == "merge":
            merge_adapter(base, adapter, tmp_path / "merged")
        else:
            load_writer(adapter)

    # Neither works in the end: the base that is named does not exist, and the weights fit no base.
    damaged = many(22, damage_json, json.dumps(ADAPTER).encode())
    assert check_all(written_and_used, (b"[" * 40_000, *damaged)) == 0


# Run folders.


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that was trained to its end."""
    world = HubWorld(job(epochs=1, num_samples=20))
    world.join(*"abc", memory_mb=250.0)
    world.run()
    place = tmp_path / "run"
    with EventLog(place) as store:
        for event in world.log:
            store.append(event)
    write_hub_file(
        place, msgspec.structs.replace(new_hub_file(), addresses=("tcp://127.0.0.1:7",), job="toy")
    )
    return place


def use_hub_file(place):
    file = read_hub_file(place)
    assert file.process is None or file.process.pid > 0
    assert read_token(file.invitation).hub_key == file.keys.public


def test_hub_files(folder):
    good = (folder / "hub.json").read_bytes()

    def written_and_read(data):
        (folder / "hub.json").write_bytes(data)
        use_hub_file(folder)

    assert check_all(written_and_read, many(9, damage_json, good)) > 0


def test_guest_files(tmp_path):
    guests = GuestList().invite("0f" * 8, "ana", 1.5e9, 3600.0, 2).invite("1e" * 8, "ben", 1.5e9, None, None)

    def written_and_used(data):
        (tmp_path / "guests.json").write_bytes(data)
        known = GuestFile(tmp_path).read()
        for each in known.invitations:
            each.reason_against(1, 1.6e9)

    assert check_all(written_and_used, many(23, damage_json, msgspec.json.encode(guests))) > 0
    num_read = check_all(lambda _: GuestFile(tmp_path).read(), in_place_of_a_file(tmp_path / "guests.json"))
    assert num_read == 2  # without a file, or where one leads nowhere, nobody is invited by name


def in_place_of_a_file(place):
    """Yield what may lie where a file is expected."""
    place.unlink(missing_ok=True)
    yield
    place.mkdir()
    yield
    place.rmdir()
    for target in ("/dev/zero", "/dev/null", str(place), "/nowhere", "/etc/passwd", str(place.parent)):
        place.symlink_to(target)
        yield
        place.unlink()
    os.mkfifo(place)
    yield
    place.unlink()
    place.write_bytes(b"")
    yield


@pytest.mark.parametrize("name", ["hub.json", "hub.sqlite"])
def test_what_lies_in_place_of_a_file_is_refused(folder, name):
    read = use_hub_file if name == "hub.json" else read_status
    states = in_place_of_a_file(folder / name)
    num_read = check_all(lambda _: read(folder), states)
    assert num_read == 0


def show(place):
    status = read_status(place)
    Console(file=io.StringIO(), width=100).print(show_status(status))
    json.dumps(status_to_dict(status), allow_nan=False)


def damage_rows(rng, place):
    """Change rows, tables or the version of a log; what it holds is then still a database."""
    database = sqlite3.connect(place)
    database.text_factory = bytes
    rows = database.execute("SELECT number, kind, body FROM events ORDER BY number").fetchall()
    number, kind, body = rng.choice(rows)
    match rng.randrange(9):
        case 0 | 1 | 2:
            body = damage_event(rng, kind, body)
            database.execute("UPDATE events SET body = ? WHERE number = ?", (body, number))
        case 3:
            odd = rng.choice([3, 2.5, "text", b"\xff\xfe", "Tick", "Received", "os.system", "", body])
            column = rng.choice(["kind", "body"])
            database.execute(f"UPDATE events SET {column} = ? WHERE number = ?", (odd, number))
        case 4:
            database.execute("DELETE FROM events WHERE number = ?", (number,))
        case 5:
            _, kind, body = rng.choice(rows)
            database.execute("UPDATE events SET kind = ?, body = ? WHERE number = ?", (kind, body, number))
        case 6:
            odd = rng.choice([0, 2, -1, 2**31 - 1])
            database.execute(f"PRAGMA user_version = {odd}")
        case 7:
            database.execute(
                "CREATE TABLE states (id INTEGER PRIMARY KEY, number INTEGER, seal TEXT, body BLOB)"
            )
            database.execute("INSERT INTO states VALUES (0, 1, 'seal', ?)", (rng.randbytes(50),))
        case _:
            database.execute("ALTER TABLE events RENAME TO other")
            database.execute(rng.choice(FOREIGN_TABLES))
    database.commit()
    database.close()


FOREIGN_TABLES = [
    "CREATE VIEW events AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
    "SELECT x AS number, 'Tick' AS kind, x'90' AS body FROM n",
    "CREATE TABLE events (number INTEGER PRIMARY KEY, kind TEXT)",
    "CREATE TABLE events (number TEXT, kind BLOB, body TEXT, more TEXT)",
    "CREATE TABLE events (number INTEGER PRIMARY KEY, kind TEXT, body BLOB AS (zeroblob(900000000)))",
    "CREATE INDEX events ON other (kind)",
]


def damage_event(rng, kind, body):
    if kind == b"Received" and rng.random() < 0.7:
        sender, header, now = msgspec.msgpack.decode(body)
        changed = header[:1] + damage_msgpack(rng, header[1:])
        return msgspec.msgpack.encode(
            (rng.choice([sender, "ghost"]), changed, rng.choice([now, -1.0, 1e300]))
        )
    return damage_msgpack(rng, body)


def put_log(folder, content):
    for leftover in folder.glob("hub.sqlite*"):
        leftover.unlink()
    (folder / "hub.sqlite").write_bytes(content)


def test_logs_that_are_databases(folder):
    good = (folder / "hub.sqlite").read_bytes()

    def changed_and_read(seed):
        put_log(folder, good)
        damage_rows(random.Random(seed + 1_000 * SEED), folder / "hub.sqlite")
        show(folder)

    assert check_all(changed_and_read, range(NUM_INPUTS)) > 0


def damage_database(rng, good):
    """Damage the bytes of a database, its first page more often than the others."""
    changed = bytearray(damage_bytes(rng, good) if rng.random() < 0.2 else good)
    for _ in range(rng.choice([1, 3, 20, 200])):
        changed[rng.randrange(min(len(changed), rng.choice([100, 4096, len(changed) or 1])) or 1)] = (
            rng.randrange(256)
        )
    return bytes(changed)


def test_logs_that_are_damaged(folder):
    good = (folder / "hub.sqlite").read_bytes()

    def written_and_read(data):
        put_log(folder, data)
        show(folder)

    assert check_all(written_and_read, many(11, damage_database, good)) > 0


# Checkpoints.


@pytest.fixture
def checkpoint(tmp_path):
    Checkpoints(tmp_path).write(1, parts_of(1), books_of(1), 0.5)
    return tmp_path / "checkpoints" / "000001"


def find_checkpoint(folder):
    kept = Checkpoints(folder)
    found = kept.find()
    for fault in kept.faults:
        sentence(fault)
    if found is None:
        assert kept.faults
        return False
    return all(len(tensor.buffer) >= 0 for tensor in found.read())


def seal(manifest, number=1, layout=1):
    """A manifest's file as its writer makes it, for a manifest that no writer would make."""
    envelope = {
        "format": layout,
        "number": number,
        "hash": name_blob(manifest).blob,
        "manifest": msgspec.Raw(manifest),
    }
    return msgspec.json.encode(envelope)


def test_manifests(checkpoint):
    good = (checkpoint / MANIFEST).read_bytes()
    inner = bytes(msgspec.json.decode(good, type=dict[str, msgspec.Raw])["manifest"])

    def damage(rng, content):
        if rng.random() < 0.3:
            return damage_json(rng, content)
        changed = damage_json(rng, inner)
        try:
            return seal(changed)
        except (ValueError, msgspec.MsgspecError):
            return changed

    def written_and_found(data):
        (checkpoint / MANIFEST).write_bytes(data)
        find_checkpoint(checkpoint.parents[1])

    check_all(written_and_found, many(12, damage, good))


def test_parts(checkpoint):
    part = checkpoint / "part-0.safetensors"
    good, manifest = part.read_bytes(), json.loads((checkpoint / MANIFEST).read_bytes())["manifest"]
    length = int.from_bytes(good[:8], "little")

    def damage(rng, content):
        if rng.random() < 0.4:
            return damage_bytes(rng, content)
        header = damage_json(rng, content[8 : 8 + length])
        claimed = rng.choice([len(header)] * 8 + [2**63, 2**64 - 1, 0])
        return claimed.to_bytes(8, "little") + header + content[8 + length :]

    def written_and_found(data):
        part.write_bytes(data)
        blob = name_blob(data)
        manifest["parts"][0]["content"] = {"blob": blob.blob, "size_bytes": blob.size_bytes}
        (checkpoint / MANIFEST).write_bytes(seal(json.dumps(manifest).encode()))
        find_checkpoint(checkpoint.parents[1])

    check_all(written_and_found, many(13, damage, good))


# What `ravnest join` leaves for `ravnest pause`.


def test_registrations(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    place = tmp_path / "ravnest" / "peers"
    place.mkdir(parents=True)
    good = json.dumps({"name": "ana", "started_at": 1.5e9}).encode()

    def written_and_found(data):
        for name in ("1.json", "x.json", f"{10**40}.json"):
            (place / name).write_bytes(data)
        (place / "folder.json").mkdir(exist_ok=True)
        assert find_running() == []

    check_all(written_and_found, many(14, damage_json, good))


# The commands themselves.


def run_command(*arguments):
    """Run a command; it works, or ends with a sentence and the exit code of a file that is not usable."""
    with no_effects():
        result = CliRunner().invoke(program, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code in (0, 3), (arguments, result.output)
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output
    if result.exit_code:
        assert result.stderr.splitlines()[-1].startswith("error: ")
    return result.exit_code


def test_status_of_crafted_folders(folder):
    good, hub_file = (folder / "hub.sqlite").read_bytes(), (folder / "hub.json").read_bytes()
    codes = {run_command("status", str(folder)), run_command("status", str(folder), "--json")}
    assert codes == {0}
    rng = random.Random(20 + 1_000 * SEED)
    codes = []
    for number in range(NUM_COMMANDS):
        put_log(folder, good)
        damage_rows(random.Random(number + 1_000 * SEED), folder / "hub.sqlite")
        codes.append(run_command("status", str(folder), *(["--json"] if number % 2 else [])))
        put_log(folder, damage_database(rng, good))
        codes.append(run_command("status", str(folder)))
        put_log(folder, good)
        (folder / "hub.json").write_bytes(damage_json(rng, hub_file))
        codes += [run_command("status", str(folder)), run_command("token", str(folder))]
        (folder / "hub.json").write_bytes(hub_file)
    assert {0, 3} == set(codes)


def test_a_saved_state_of_an_older_ravnest_runs_no_code(folder, tmp_path):
    """A crafted state once made `ravnest status` run a command of its author's choice."""
    trap = tmp_path / "trap"
    table = [
        ["object", ["pathlib:Path", ["_str", f"touch {trap}"]]],
        ["method", [[0], "_flavour"]],
        ["method", [[1], "pathmod"]],
        ["method", [[2], "os"]],
        ["method", [[3], "system"]],
        ["object", ["ravnest.hub.service.status:StatusTracker", ["hub", [4]]]],
    ]
    body = msgspec.msgpack.encode(([5], table))
    with sqlite3.connect(folder / "hub.sqlite") as database:
        database.execute("CREATE TABLE states (id INTEGER PRIMARY KEY, number INTEGER, seal TEXT, body BLOB)")
        for number, sealed in enumerate([name_blob(body).blob, "", "seal"]):
            database.execute("INSERT INTO states VALUES (?, ?, ?, ?)", (number, 10, sealed, body))
    database.close()
    assert run_command("status", str(folder)) in (0, 3)
    assert not trap.exists()


def test_commands_on_damaged_tokens_and_files(tmp_path):
    rng, place = random.Random(21 + 1_000 * SEED), tmp_path / "file.toml"
    for _ in range(NUM_COMMANDS):
        damaged = damage_token(rng, TOKEN).replace("\0", "")
        if damaged.lower().startswith(PREFIX):
            run_command("token", "--", damaged)
        place.write_bytes(damage_lines(rng, SETTINGS) + b"\nbroken")
        assert run_command("plan", "--nodes", str(place), "--model", str(place)) == 3
        assert run_command("plan", "--population", "home:3", "--config", str(place)) == 3
        assert run_command("plan", "--population", "home:3", "--model", str(place)) == 3
