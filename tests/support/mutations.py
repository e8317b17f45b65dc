"""Damaged and hostile inputs made from sound ones: flipped bytes, swapped types, deep nests, encodings."""

import copy
import json
import random
import sys
from contextlib import contextmanager

import msgspec

VALUES = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e308, -1e308),
    *("", "x", "x" * 300, "\x1b]0;owned\x07", "__class__", "../../../etc/passwd", "$(touch /tmp/x)", "a\nb"),
    *("8 GB", "1e999 GB", "nan", "-1 s", "0x10", "true", "tcp://127.0.0.1:1", "\u202e", "\U0001f600"),
    *([], {}, [[]], [1, 2, 3], ["eu", "us"], {"batch": [1, 0]}, {"py/object": "os.system"}),
    *([[[[[[[[[[[[[[[1]]]]]]]]]]]]]]], [0] * 1000),
]
LITERALS = [
    *("NaN", "-Infinity", "1e400", "-1e999", "9" * 400, "9" * 5_000, "1" * 400 + ".5", '"\\ud800"'),
    *("[" * 2_000, "{" * 2_000, "[" * 2_000 + "]" * 2_000, '{"a":' * 1_000 + "1" + "}" * 1_000, "//", "'x'"),
]
WATCHED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen")
WATCHED += ("pickle.find_class", "ctypes.dlopen", "socket.connect", "sqlite3.enable_load_extension")


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return the data with bytes flipped, cut, doubled, swapped or in another encoding."""
    changed = bytearray(data)
    place = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0 | 1 | 2:
            for _ in range(rng.randint(1, 8)):
                # Half of them are bytes that occur in the data, to get past a parser more often.
                changed[rng.randrange(len(data))] = rng.choice([rng.randrange(256), rng.choice(data)])
        case 3:
            del changed[place:]
        case 4:
            del changed[place : place + rng.choice([1, 2, 50])]
        case 5:
            start = rng.randrange(len(data))
            changed[place:place] = data[start : start + rng.choice([1, 8, 200])]
        case 6:
            changed[place:place] = rng.choice(
                [*map(str.encode, LITERALS), b"\x00" * 100, b"\xff\xfe", b"\xc3"]
            )
        case _:
            encoding = rng.choice(["utf-16", "utf-32", "utf-8-sig", "cp500"])
            return data.decode(errors="replace").encode(encoding, errors="replace")
    return bytes(changed)


def damage_tree(rng: random.Random, document: object) -> object:
    """Return the document with a few slots replaced, removed, renamed or swapped."""
    changed = copy.deepcopy(document)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        slots = list(_slots(changed))
        if not slots:
            return rng.choice(VALUES)
        place, key = rng.choice(slots)
        match rng.randrange(6):
            case 0 | 1 | 2:
                place[key] = copy.deepcopy(rng.choice(VALUES))
            case 3:
                del place[key]
            case 4 if isinstance(place, dict):
                place[rng.choice([str(key)[:-1], str(key) + "x", "hooks", "__init__"])] = place.pop(key)
            case _:
                other, name = rng.choice(slots)
                place[key] = copy.deepcopy(other[name])
    return changed


def damage_json(rng: random.Random, good: bytes) -> bytes:
    """Return JSON that is damaged as bytes or as a tree, or has a key twice or an odd literal."""
    way = rng.randrange(10)
    if way < 3:
        return damage_bytes(rng, good)
    if way < 8:
        return json.dumps(damage_tree(rng, json.loads(good))).encode()
    document = json.loads(good)
    place, key = rng.choice(list(_slots(document)))
    if way == 8 and isinstance(place, dict):
        place["TWICE"] = rng.choice(VALUES)
        return json.dumps(document).replace('"TWICE"', json.dumps(key), 1).encode()
    place[key] = "LITERAL"
    return json.dumps(document).replace('"LITERAL"', rng.choice(LITERALS), 1).encode()


def damage_msgpack(rng: random.Random, good: bytes) -> bytes:
    """Return msgpack that is damaged as bytes or as a tree."""
    if rng.random() < 0.4:
        return damage_bytes(rng, good)
    try:
        return msgspec.msgpack.encode(damage_tree(rng, msgspec.msgpack.decode(good)))
    except (OverflowError, UnicodeError):  # an integer or text that msgpack has no form for
        return damage_bytes(rng, good)


def damage_lines(rng: random.Random, good: str) -> bytes:
    """Return TOML with a value, a key or a header replaced, or damaged as bytes."""
    if rng.random() < 0.4:
        return damage_bytes(rng, good.encode())
    lines = good.splitlines()
    index = rng.randrange(len(lines))
    key, sign, _ = lines[index].partition(" = ")
    odd = [*LITERALS, *(json.dumps(value) for value in VALUES if value is not None)]
    odd += ["1979-05-27T07:32:00Z", "nan", "inf", "0x" + "f" * 4_000, "'''", "{ a = 1 }", "[[", "1_000"]
    match rng.randrange(5):
        case 0 | 1 if sign:
            lines[index] = f"{key} = {rng.choice(odd)}"
        case 2:
            lines[index] = rng.choice(
                ["[node]", "[[node]]", "[plan]", "[a.b.c]", "x" + ".a" * 500 + " = 1", "["]
            )
        case 3:
            lines.insert(rng.randrange(len(lines)), lines[index])
        case _:
            del lines[index]
    return "\n".join(lines).encode()


def _slots(value):
    """Yield every (container, key) of a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in pairs:
        yield value, key
        yield from _slots(part)


_seen: list[str] | None = None


def _audit(event: str, _arguments: tuple) -> None:
    if _seen is not None and event in WATCHED:
        _seen.append(event)


sys.addaudithook(_audit)


@contextmanager
def no_effects():
    """Fail if what runs inside starts a program, loads code or dials."""
    global _seen
    _seen = []
    try:
        yield
        assert not _seen, _seen
    finally:
        _seen = None
