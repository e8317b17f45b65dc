"""`ravnest doctor` and `ravnest env`: whether this PC can take part, and what to paste into a bug report."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import click

from ravnest.cli.common import find_parts, to_json
from ravnest.errors import RavnestError
from ravnest.units import show_bytes, show_plainly

if TYPE_CHECKING:
    from ravnest.net.identity import Token

_PACKAGES = ("ravnest", "torch", "numpy", "safetensors", "msgspec", "pyzmq", "psutil", "rich", "click")
_LITTLE_MEMORY, _LITTLE_DISK = 1 << 30, 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `fix` says what to do about it."""

    verdict: str  # ok, warn or fail
    what: str
    fix: str = ""


@click.command()
@click.argument("token", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.doctor/1).")
def doctor(token: str | None, as_json: bool) -> None:
    """Look whether this PC can take part, and with TOKEN, whether its hub can be reached and accepts it.

    Nothing is joined. Ends with 1 if something has to be fixed first.
    """
    findings = [*_look_at_programs(), *_look_at_machine(), *_look_at_fences()]
    if token is not None:
        findings += _look_at_hub(token)
    if as_json:
        click.echo(to_json({"schema": "ravnest.doctor/1", "findings": [asdict(each) for each in findings]}))
    else:
        for each in findings:
            click.echo(f"{each.verdict:5} {each.what}" + (f"\n      -> {each.fix}" if each.fix else ""))
    if any(each.verdict == "fail" for each in findings):
        raise RavnestError("something has to be fixed first: see the lines that say fail")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.env/1).")
def env(as_json: bool) -> None:
    """Print versions and hardware, to paste into a bug report. There are no names, addresses or secrets."""
    import os
    import platform

    import torch

    found: dict[str, object] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) or "missing" for name in _PACKAGES},
        "device": _device(),
        "cpu cores": os.cpu_count() or 0,
        "torch threads": torch.get_num_threads(),
        "memory": show_bytes(_memory()[1]),
    }
    if as_json:
        click.echo(to_json({"schema": "ravnest.env/1", **found}))
    else:
        for name, value in found.items():
            click.echo(f"{name:14} {value}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> tuple[int, int]:
    """Return what is free, and all of it."""
    import psutil  # type: ignore[import-untyped]

    found = psutil.virtual_memory()
    return found.available, found.total


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"cuda: {torch.cuda.get_device_name()}, torch for CUDA {torch.version.cuda}"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _look_at_programs() -> Iterator[Finding]:
    import platform

    python = tuple(map(int, platform.python_version_tuple()[:2]))
    known = ", ".join(f"{name} {_version(name)}" for name in ("torch", "ravnest") if _version(name))
    is_new = python >= (3, 11)
    fix = "" if is_new else "ravnest needs Python 3.11 or newer"
    yield Finding("ok" if is_new else "fail", f"python {platform.python_version()}, {known}", fix)
    missing = [name for name in _PACKAGES if _version(name) is None and name != "ravnest"]
    if missing:
        yield Finding("fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")


def _look_at_machine() -> Iterator[Finding]:
    import os
    import shutil
    from pathlib import Path

    import torch

    free, total = _memory()
    is_little = free < _LITTLE_MEMORY
    memory = f"{_device()}; {os.cpu_count()} cores; {show_bytes(free)} free of {show_bytes(total)}"
    yield Finding(
        "warn" if is_little else "ok", memory, "close other programs, or lend less" if is_little else ""
    )
    has_nvidia = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
    if has_nvidia and not torch.cuda.is_available():
        fix = "install a torch for CUDA (pytorch.org), or look at nvidia-smi"
        yield Finding("warn", "an NVIDIA GPU seems to be here, but torch cannot use it", fix)
    try:
        ones = torch.ones(8, 8, dtype=torch.bfloat16)
        is_right = bool((ones @ ones == 8).all())
    except RuntimeError:
        is_right = False
    fix = "" if is_right else "update torch; activations travel as bf16 between PCs"
    yield Finding("ok" if is_right else "fail", "bf16 works" if is_right else "bf16 does not work", fix)
    room = shutil.disk_usage(Path.cwd()).free
    has_room = room >= _LITTLE_DISK
    yield Finding(
        "ok" if has_room else "warn",
        f"disk {show_bytes(room)} free here",
        "" if has_room else "make room, if you are to keep results on this disk",
    )


def _look_at_fences() -> Iterator[Finding]:
    """Start what computes, without any work, and say what it is kept from."""
    import tempfile

    from ravnest.errors import ComputeLost
    from ravnest.peer.compute_process import ComputeProcess, start_child

    parts = find_parts()
    with tempfile.TemporaryDirectory(prefix="ravnest-") as folder:
        start = parts.start_compute or start_child
        compute = ComputeProcess(folder, parts.timeouts.peer, device="auto", start=start)
        try:
            found = compute.try_fences()
        except ComputeLost as error:
            yield Finding("fail", str(error), "ravnest join would end the same way")
            return
    yield Finding("ok", "what computes is a process of its own, without keys")
    for held in found.held:
        yield Finding("ok", f"fence: {show_plainly(held)}")
    for missing in found.missing:
        fix = "a kernel with Landlock and seccomp has all of them, for a CPU"
        yield Finding("warn", f"no fence: {show_plainly(missing)}", fix)


def _look_at_hub(text: str) -> Iterator[Finding]:
    import asyncio

    from ravnest.errors import ConfigError, LinkError, NotAdmitted
    from ravnest.net.identity import read_token

    try:
        token = read_token(text)
    except ConfigError as error:
        yield Finding("fail", str(error), "copy the whole line that the hub shows")
        return
    try:
        where, seconds = asyncio.run(_knock(token))
    except NotAdmitted as error:
        yield Finding(
            "fail", f"the hub refuses: {error}", "ask for a new token, and update the older ravnest"
        )
    except LinkError as error:
        fix = "is the hub running, is its port open in its firewall and forwarded by its router?"
        yield Finding("fail", f"the hub cannot be reached: {error}", fix)
    else:
        yield Finding("ok", f"the hub answers at {where} in {1e3 * seconds:.0f} ms, and accepts the token")


async def _knock(token: "Token") -> tuple[str, float]:
    """Return which address of the hub answered and after how long; or raise why none did."""
    import asyncio
    import random

    from ravnest.errors import LinkError, NotAdmitted
    from ravnest.net.identity import greet, new_keys, peer_of
    from ravnest.net.transport import DialFailed, LinkUp, PublicKey
    from ravnest.net.zeromq import ZeroMqTransport

    keys, hub = new_keys(), PublicKey(token.hub_key)
    reasons = dict.fromkeys(token.addresses, "no answer")
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with ZeroMqTransport(keys, random.SystemRandom()) as transport:
        transport.allow([hub])
        transport.dial(peer_of(hub), token.addresses, greet(token, keys.public))
        try:
            async with asyncio.timeout(find_parts().timeouts.program.doctor_seconds):
                while True:
                    match await transport.receive():
                        case LinkUp(_, _, address):
                            return address or token.addresses[0], loop.time() - start
                        case DialFailed(_, reason, is_refusal, address):
                            if is_refusal:
                                raise NotAdmitted(reason)
                            reasons[address] = reason
        except TimeoutError:
            raise LinkError("; ".join(f"{where}: {why}" for where, why in reasons.items())) from None
