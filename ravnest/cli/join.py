"""`ravnest join`, `pause`, `resume` and `finish`: lend this PC to a swarm, and take it back."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

import click

from ravnest.cli.common import CommandParts, find_parts, options_file, to_json
from ravnest.config import CompileMode
from ravnest.disk import read_bounded
from ravnest.errors import ConfigError, LinkError, RavnestError
from ravnest.units import (
    Dimension,
    parse_quantity,
    show_bytes,
    show_flops,
    show_plainly,
    show_rate,
    show_value,
)

if TYPE_CHECKING:
    import psutil  # type: ignore[import-untyped]

    from ravnest.cli.lending_loop import Hours, Lending, Terms
    from ravnest.net.identity import Token
    from ravnest.peer.agent import Offer
    from ravnest.peer.compute import ComputeThread
    from ravnest.peer.compute_frames import Surveyed
    from ravnest.peer.compute_process import ComputeProcess
    from ravnest.peer.machine import Machine
    from ravnest.provider.lending_page import LendingPage


_LONGEST_NAME = 40
_MOST_TOKEN_BYTES = 1 << 18
_LONGEST_BATCH_SECONDS = 600.0  # a stage that would need longer for one batch is not run here
_EVERYWHERE = "tcp://0.0.0.0:*"
_ONLY_HERE = "tcp://127.0.0.1:*"  # where what comes through the relay is led to
_VARIABLE = "RAVNEST_TOKEN"
_THIS_PC, _PREFIX = "this PC", "rvn1_"
_GUESSED = "of matrix products; the job's own work will tell"
_USUAL_BYTES_PER_SECOND, _USUAL_LATENCY_SECONDS = 50e6 / 8, 0.01  # until the hub has measured the link
_OWN_GROWTH = 1.25  # of the program itself, from its start to its work; torch for GPUs starts with 630 MB
_AGENT_SHARE = 0.2  # of the freed memory that the plan lets a peer keep; compute keeps the rest
_SLOWEST_UPLOAD = 100e3 / 8  # signs of life alone take a tenth of it


@dataclass(frozen=True, slots=True)
class _Listening:
    """Where this PC listens, and what others are told of that."""

    listen: str
    public: tuple[str, ...]
    is_reachable: bool

    def addresses(self, address: str) -> tuple[str, ...]:
        from ravnest.net.identity import dialled_from_elsewhere

        return (*self.public, *dialled_from_elsewhere(address)) if self.is_reachable else ()


@dataclass(frozen=True, slots=True)
class _Stated:
    """What its provider says of this PC; None is left to be measured. An emulated PC is as slow as that."""

    device: str
    memory_bytes: float | None
    flops_per_second: float | None
    emulated_flops_per_second: float | None
    bytes_per_second: float | None
    latency_seconds: float | None
    gpu_memory_bytes: float | None = None
    upload_bytes_per_second: float | None = None
    hours: tuple["Hours", ...] = ()
    runs_on_battery: bool = False
    hub_process: int | None = None  # of a hub on this PC
    compile_mode: CompileMode = CompileMode.AUTO
    num_threads: int = 0  # for torch; 0: as it likes
    is_fenced: bool = True  # compute is a process of its own
    page: str | None = None  # where; nothing: at the usual port of this PC; None: there is none


@click.command()
@click.argument("token", required=False)
@click.option("--token-file", metavar="FILE", help=f"Read the token here, or from stdin (-); or {_VARIABLE}.")
@click.option("--name", metavar="NAME", help="What others call this PC; its host name if left out.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, mps, or the fastest.")
@click.option("--compile", metavar="auto|on|off", default="auto", show_default=True, help="auto: on CUDA.")
@click.option(
    "--memory", metavar="SIZE", help="Memory to lend, like '4 GB'; half of what is free (GPU: 80 %)."
)
@click.option("--gpu-memory", metavar="SIZE", help="Memory of the GPU to lend; --memory is then the PC's.")
@click.option("--cpu", metavar="SHARE", help="Cores to lend, like '50 %' of them, or '2'; all if left out.")
@click.option("--upload", metavar="RATE", help="Most to send, over all links, like '20 Mbit/s'.")
@click.option("--hours", metavar="SPAN", multiple=True, help="When to lend, like 22:00-07:00; else always.")
@click.option("--on-battery", metavar="stop|go", default="stop", show_default=True, help="Lend it then?")
@click.option("--flops", metavar="RATE", help="Speed to claim, like '50 GFLOP/s'; measured if left out.")
@click.option("--emulate", metavar="RATE", help="Be as slow as a PC of this speed, like '2 GFLOP/s'.")
@click.option("--bandwidth", metavar="RATE", help="Up and down, like '50 Mbit/s'; measured if left out.")
@click.option("--latency", metavar="TIME", help="To others, one way, like '10 ms'; measured if left out.")
@click.option("--listen", metavar="HOST:PORT", help="Where to listen for others; a free port if left out.")
@click.option("--public", metavar="HOST:PORT", multiple=True, help="What a router forwards to that.")
@click.option("--outbound-only", is_flag=True, help="Listen for nobody: only dial, or meet at the hub.")
@click.option("--patience", metavar="TIME", default="10 min", show_default=True, help="Without the hub.")
@options_file
@click.option(
    "--page",
    is_flag=False,
    flag_value=_THIS_PC,
    metavar="[HOST:PORT]",
    help="Serve a page of what runs here, to look at and to take the PC back; only on this PC if left out.",
)
@click.option("--hub-process", type=int, hidden=True, help="Wait for the hub while this process runs.")
@click.option("--compute", hidden=True, default="process", help="process, or thread: without any fence.")
@click.option("--quiet", is_flag=True, help="Say only what went wrong.")
@click.option("--verbose", is_flag=True, help="Say what the program does, too.")
def join(  # noqa: PLR0913 - click passes one argument per option
    token: str | None,
    token_file: str | None,
    name: str | None,
    device: str,
    compile: str,  # noqa: A002 - click names it by the option
    memory: str | None,
    gpu_memory: str | None,
    cpu: str | None,
    upload: str | None,
    hours: tuple[str, ...],
    on_battery: str,
    flops: str | None,
    emulate: str | None,
    bandwidth: str | None,
    latency: str | None,
    listen: str | None,
    public: tuple[str, ...],
    outbound_only: bool,
    patience: str,
    page: str | None,
    hub_process: int | None,
    compute: str,
    quiet: bool,
    verbose: bool,
) -> None:
    """Lend this PC to the swarm that TOKEN invites to, until its job is done or Ctrl-C.

    Ends with 4 if the hub cannot be reached, with 5 if it refuses the token, with 7 if the program takes more
    memory than it lends or a stage crashes again and again. It runs no code from the job. What computes is a
    process of its own, without network, keys and home folder. See `ravnest pause` too.
    """
    from ravnest.cli.lending_loop import read_hours
    from ravnest.net.identity import read_token
    from ravnest.peer.machine import THIS_PC, count_cores, limit_cpu, read_cores

    if token is None and token_file is None and page is not None and page.lower().startswith(_PREFIX):
        token, page = page, _THIS_PC  # `ravnest join --page TOKEN`
    invitation = read_token(_find_token(token, token_file))
    listening = _choose_listening(listen, public, outbound_only)
    stated = _Stated(
        device,
        _read(memory, Dimension.BYTES),
        _read(flops, Dimension.FLOPS_PER_SECOND),
        _read(emulate, Dimension.FLOPS_PER_SECOND),
        _read(bandwidth, Dimension.BYTES_PER_SECOND),
        _read(latency, Dimension.SECONDS),
        _read(gpu_memory, Dimension.BYTES),
        _read_upload(upload),
        tuple(map(read_hours, hours)),
        _read_choice(on_battery),
        hub_process,
        _read_compile(compile),
        0 if cpu is None else read_cores(cpu, count_cores()),
        _read_compute(compute),
        _read_page(page),
    )
    patience_seconds = _read(patience, Dimension.SECONDS) or 0.0 if hub_process is None else inf
    parts = find_parts()
    machine = parts.machine or THIS_PC
    _say_so_much(quiet, verbose)
    cores = "" if cpu is None else limit_cpu(cpu)
    with _open_compute(stated, parts) as (computing, surveyed, folder):
        offer = _make_offer(name, stated, listening, patience_seconds, surveyed)
        offer = replace(offer, folder=folder)
        if not quiet:
            _show(invitation, offer, _show_limits(stated, cores, machine))
        known = replace(parts, machine=_with_compute(machine, computing))
        code, reason = _take_part(invitation, offer, listening, stated, known, computing, cores)
    if not quiet:
        click.echo(f"ended: {reason}", err=True)
    sys.exit(code)


@contextlib.contextmanager
def _open_compute(
    stated: _Stated, parts: CommandParts
) -> "Iterator[tuple[ComputeProcess | ComputeThread, Surveyed, str | None]]":
    """Start what computes, have it look at this PC, and give it a folder for as long as this program runs."""
    from ravnest.peer.compute_frames import SurveyOrder
    from ravnest.peer.compute_process import ComputeProcess, may_use_gpu, start_child
    from ravnest.peer.machine import keep_compiled, keep_few_arenas

    keep_few_arenas()  # before there is a second thread
    speed = stated.flops_per_second or stated.emulated_flops_per_second
    order = SurveyOrder(stated.device, stated.num_threads, stated.gpu_memory_bytes, speed is None)
    if stated.compile_mode.applies_to("cuda" if may_use_gpu(stated.device) else "cpu"):
        keep_compiled(os.environ)  # before anything of torch chooses a folder
    if not stated.is_fenced:
        from ravnest.peer.compute import ComputeThread

        thread = ComputeThread(parts.timeouts.peer)
        yield thread, thread.survey(order), None
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_make_folder())
        process = ComputeProcess(
            folder,
            parts.timeouts.peer,
            device=stated.device,
            compile_mode=stated.compile_mode,
            start=parts.start_compute or start_child,
        )
        stack.callback(process.stop)
        yield process, process.survey(order), folder


@contextlib.contextmanager
def _make_folder() -> "Iterator[str | None]":
    """Give a folder that goes with this program; None if the disk takes none."""
    import tempfile

    try:
        made = tempfile.TemporaryDirectory(prefix="ravnest-", ignore_cleanup_errors=True)
    except OSError:  # said when something is to be kept
        yield None
        return
    with made as folder:
        yield folder


def _with_compute(machine: "Machine", compute: "ComputeProcess | ComputeThread") -> "Machine":
    """Return the PC on which the memory of compute counts, too, and is free while it is not lent."""
    from ravnest.peer.machine import memory_of_process

    def taken() -> float:
        return machine.taken_memory_bytes() + memory_of_process(compute.process_id)

    return replace(machine, taken_memory_bytes=taken, release_memory=compute.stop)


def _say_so_much(quiet: bool, verbose: bool) -> None:
    usual = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=usual, format="%(message)s")
    logging.getLogger("ravnest").setLevel(logging.DEBUG if verbose else usual)
    for noisy in ("uvicorn",) if verbose else ("ravnest.net", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _read(text: str | None, dimension: Dimension) -> float | None:
    value = None if text is None else parse_quantity(text, dimension)
    if text is not None and dimension is Dimension.BYTES and not text.rstrip()[-1].isalpha():
        raise ConfigError(f"{text!r} has no unit and would be bytes; give something like {dimension.value!r}")
    if value is not None and (value < 0 or (value == 0 and dimension is not Dimension.SECONDS)):
        raise ConfigError(f"{text!r} is too little; give something like {dimension.value!r}")
    return value


def _read_upload(text: str | None) -> float | None:
    rate = _read(text, Dimension.BYTES_PER_SECOND)
    if rate is not None and rate < _SLOWEST_UPLOAD:
        raise ConfigError(
            f"--upload {text} is too slow to take part; give {show_rate(_SLOWEST_UPLOAD)} or more"
        )
    return rate


def _read_choice(on_battery: str) -> bool:
    if on_battery not in ("stop", "go"):
        raise ConfigError(f"--on-battery {show_value(on_battery)} is neither; give stop or go")
    return on_battery == "go"


def _read_compile(text: str) -> CompileMode:
    if text not in list(CompileMode):
        raise ConfigError(f"--compile {show_value(text)} is none of them; give {', '.join(CompileMode)}")
    return CompileMode(text)


def _read_compute(text: str) -> bool:
    if text not in ("process", "thread"):
        raise ConfigError(f"--compute {show_value(text)} is neither; give process or thread")
    return text == "process"


def _read_page(page: str | None) -> str | None:
    from ravnest.net.identity import read_address

    return "" if page == _THIS_PC else page and read_address(page, is_own=True)


def _find_token(token: str | None, file: str | None) -> str:
    if token is not None and file is not None:
        raise ConfigError("both a TOKEN and --token-file are given; leave one out")
    if token is not None:
        return token
    if file == "-":
        return sys.stdin.readline(_MOST_TOKEN_BYTES)
    if file is not None:
        return read_bounded(file, _MOST_TOKEN_BYTES, is_plain=False).decode(errors="replace")
    if not os.environ.get(_VARIABLE):
        raise ConfigError(
            f"no token: paste the line the hub shows, or give it by --token-file or {_VARIABLE}"
        )
    return os.environ[_VARIABLE]


def _choose_listening(listen: str | None, public: tuple[str, ...], outbound_only: bool) -> _Listening:
    from ravnest.net.identity import read_address

    if outbound_only and (listen or public):
        raise ConfigError("--outbound-only opens no door, so --listen and --public have no meaning with it")
    place = _EVERYWHERE if listen is None else read_address(listen, is_own=True)
    forwarded = tuple(map(read_address, public))
    return _Listening(_ONLY_HERE if outbound_only else place, forwarded, not outbound_only)


def _make_offer(
    name: str | None, stated: _Stated, listening: _Listening, patience_seconds: float, surveyed: "Surveyed"
) -> "Offer":
    import platform

    from ravnest.ids import NodeId
    from ravnest.peer.agent import Offer
    from ravnest.peer.compute_protocol import ProviderLimits
    from ravnest.plan.types import Node
    from ravnest.protocol.membership import Fact

    emulated = stated.emulated_flops_per_second
    memory = stated.memory_bytes if stated.gpu_memory_bytes is None else stated.gpu_memory_bytes
    speed = emulated if stated.flops_per_second is None else stated.flops_per_second
    rate, latency = stated.bytes_per_second, stated.latency_seconds
    facts = {Fact.SPEED: speed, Fact.BANDWIDTH: rate, Fact.LATENCY: latency}
    rate = _USUAL_BYTES_PER_SECOND if rate is None else rate
    node = Node(
        name=NodeId(show_plainly(name or platform.node() or "peer")[:_LONGEST_NAME]),
        memory_bytes=surveyed.memory_bytes if memory is None else memory,
        flops_per_second=(surveyed.flops_per_second or 1.0) if speed is None else speed,
        upload_bytes_per_second=min(rate, stated.upload_bytes_per_second or rate),
        download_bytes_per_second=rate,
        latency_seconds=_USUAL_LATENCY_SECONDS if latency is None else latency,
        is_reachable=listening.is_reachable,
    )
    most_flops = _LONGEST_BATCH_SECONDS * node.flops_per_second
    limits = ProviderLimits(node.memory_bytes, most_flops, surveyed.device, emulated, stated.compile_mode)
    guessed = tuple(fact for fact, value in facts.items() if value is None)
    return Offer(node, limits, (), patience_seconds, guessed=guessed)


def _show_limits(stated: _Stated, cores: str, machine: "Machine") -> str:
    """Return in words what is held to besides memory."""
    from ravnest.cli.lending_loop import show_hours

    upload = stated.upload_bytes_per_second
    limits = (
        cores,
        f"{show_rate(upload)} of upload" if upload else "",
        show_hours(stated.hours),
        "not on battery" if machine.has_battery() and not stated.runs_on_battery else "",
    )
    return ", ".join(filter(None, limits))


def _show(token: "Token", offer: "Offer", limits: str) -> None:
    """Say what is lent, and to whom."""
    from ravnest.net.identity import peer_of
    from ravnest.net.transport import PublicKey
    from ravnest.protocol.membership import Fact

    node = offer.node
    hub = peer_of(PublicKey(token.hub_key))[:8]
    source = "emulated" if offer.limits.emulated_flops_per_second else "as claimed"
    source = _GUESSED if Fact.SPEED in offer.guessed else source
    device = "" if offer.limits.device == "cpu" else f" on {offer.limits.device}"
    lent = f"{show_bytes(node.memory_bytes)} of memory and {show_flops(node.flops_per_second)}"
    lines = (
        f"lends {lent} ({source}){device} as {node.name}"
        + (f", and no more than: {limits}" if limits else ""),
        f"to hub {hub} at {', '.join(token.addresses)}",
        "it runs no code from the job: stages come as lists of known operations; Ctrl-C takes the PC back",
    )
    for line in lines:
        click.echo(line, err=True)


def _take_part(
    token: "Token",
    offer: "Offer",
    listening: _Listening,
    stated: _Stated,
    parts: CommandParts,
    compute: "ComputeProcess | ComputeThread",
    cores: str = "",
) -> tuple[int, str]:
    """Return the exit code and why it ended."""
    import asyncio
    import random

    from ravnest.cli.lending_loop import Lending
    from ravnest.net.identity import new_keys, peer_of
    from ravnest.net.transport import PublicKey, Transport, TransportLimits
    from ravnest.net.zeromq import ZeroMqTransport, allow_many_files
    from ravnest.peer.agent import Agent
    from ravnest.peer.compute_protocol import Compute

    machine, timeouts = parts.machine, parts.timeouts
    assert machine is not None
    machine.return_freed_memory(_AGENT_SHARE * offer.limits.memory_bytes)
    allow_many_files()
    lending = Lending(_make_terms(offer, stated, machine), machine, timeouts=timeouts.program)
    upload = stated.upload_bytes_per_second or inf
    limits = TransportLimits(upload_bytes_per_second=upload, timeouts=timeouts.net)
    make_transport = parts.make_transport or ZeroMqTransport
    keys = new_keys()  # by them the hub knows a peer that comes back
    hub = peer_of(PublicKey(token.hub_key))

    async def once(page: "LendingPage | None") -> str:
        async with make_transport(keys, random.SystemRandom(), listening.listen, limits) as transport:
            addresses = listening.addresses(transport.address)
            told = ", ".join(addresses) if addresses else "nowhere, it only dials out"
            logging.info("listens at %s", told)
            reachable = replace(offer, addresses=addresses, listens_at=transport.address)
            borders: tuple[Compute, Transport] = (compute, transport)
            if page is not None:
                borders = page.watch(*borders, hub)
            agent = Agent(token, keys, reachable, *borders, timeouts=timeouts)
            try:
                return await lending.attend(agent)
            finally:
                if page is not None:
                    page.leave()

    async def live() -> tuple[int, str]:
        if stated.page is None:
            return await lending.run(lambda: once(None))
        async with _open_page(token, offer, stated, cores, lending, parts) as page:
            return await lending.run(lambda: once(page))

    return asyncio.run(live())


def _open_page(
    token: "Token", offer: "Offer", stated: _Stated, cores: str, lending: "Lending", parts: CommandParts
) -> "LendingPage":
    """Return the provider's page; only whoever asks for one loads a web server."""
    from ravnest.net.identity import EVERYBODY, peer_of
    from ravnest.net.transport import PublicKey
    from ravnest.provider.lending_documents import LentTerms
    from ravnest.provider.lending_page import LendingPage
    from ravnest.provider.lending_site import LendingControl

    assert parts.machine is not None
    battery = ("go" if stated.runs_on_battery else "stop") if parts.machine.has_battery() else ""
    terms = LentTerms(
        name=offer.node.name,
        hub=peer_of(PublicKey(token.hub_key)),
        addresses=token.addresses,
        is_personal=token.invitation != EVERYBODY,
        device=offer.limits.device,
        memory_bytes=offer.limits.memory_bytes,
        flops_per_second=offer.node.flops_per_second,
        upload_bytes_per_second=stated.upload_bytes_per_second,
        cores=cores,
        hours=tuple(map(str, stated.hours)),
        on_battery=battery,
    )
    control = LendingControl(lambda: lending.facts, lending.pause, lending.resume, lending.finish)
    page = LendingPage(terms, control, stated.page or "", parts.timeouts.program)
    others = "; whoever has the link, from any PC, can take this one back" if page.is_for_others else ""
    click.echo(f"see what runs here, and take it back, at {page.link}{others}", err=True)
    return page


def _make_terms(offer: "Offer", stated: _Stated, machine: "Machine") -> "Terms":
    """Return what is looked after; torch holds a GPU to what it lends."""
    import psutil

    from ravnest.cli.lending_loop import Terms
    from ravnest.config import PlanConfig
    from ravnest.peer.machine import MemoryWatch

    device, lent = offer.limits.device, offer.limits.memory_bytes
    watched: float | None = lent if device == "cpu" else None
    if device.startswith("cuda"):
        watched = stated.memory_bytes if stated.gpu_memory_bytes is not None else None
    own = max(PlanConfig().overhead_bytes, _OWN_GROWTH * machine.taken_memory_bytes())
    memory = None if watched is None else MemoryWatch(watched, own)
    try:
        hub = None if stated.hub_process is None else psutil.Process(stated.hub_process)
    except psutil.NoSuchProcess:
        raise LinkError("the hub that started this peer has ended") from None
    return Terms(offer.node.name, stated.hours, stated.runs_on_battery, memory, hub)


_ALL = click.option(
    "--all", "is_all", is_flag=True, help="All that you lend from this PC, without a question."
)
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object (ravnest.lending/1).")


@click.command()
@click.argument("name", required=False)
@_ALL
@_AS_JSON
def pause(name: str | None, is_all: bool, as_json: bool) -> None:
    """Take this PC back for a while: what is lent from it as NAME, or the only one that is lent.

    Of several it shows the list and asks; --all means all of them, those of other runs too.
    Work is handed over, nothing is lost; `ravnest resume` lends it again. Ends with 1 if nothing is lent.
    """
    _tell("pause", name, is_all, as_json)


@click.command()
@click.argument("name", required=False)
@_ALL
@_AS_JSON
def resume(name: str | None, is_all: bool, as_json: bool) -> None:
    """Lend this PC again after `ravnest pause`: as NAME, or the only one that is lent.

    Of several it shows the list and asks; --all means all of them. Ends with 1 if no
    `ravnest join` waits for that.
    """
    _tell("resume", name, is_all, as_json)


@click.command()
@click.argument("name", required=False)
@_ALL
@_AS_JSON
def finish(name: str | None, is_all: bool, as_json: bool) -> None:
    """Take this PC back for good, as one Ctrl-C would: what is lent as NAME, or the only one that is lent.

    Of several it shows the list and asks; --all means all of them, those of other runs too.
    Work is handed over, nothing is lost. Ends with 1 if nothing is lent.
    """
    _tell("finish", name, is_all, as_json)


def _tell(word: str, name: str | None, is_all: bool, as_json: bool) -> None:
    import signal

    import psutil

    from ravnest.cli.lending_loop import PAUSE, RESUME, find_running

    number = {"pause": PAUSE, "resume": RESUME, "finish": signal.SIGTERM}[word]
    if number is None:
        raise RavnestError(
            f"this system cannot {word} a program that runs; Ctrl-C ends it, and join it again"
        )
    running = find_running()
    chosen = [(known, process) for known, process in running if name in (None, known)]
    if not chosen:
        others = ", ".join(sorted({known for known, _ in running}))
        here = f"it is lent as {others}" if others else "see that `ravnest join` runs, and as the same user"
        raise RavnestError(f"nothing is lent from this PC{f' as {name}' if name else ''}; {here}")
    if name is None and not is_all and len(chosen) > 1:
        _ask(word, chosen)
    told = []
    for known, process in chosen:
        try:
            process.send_signal(number)
            told.append({"name": known, "process": process.pid})
        except psutil.NoSuchProcess:
            click.echo(f"{known} (process {process.pid}) has just ended", err=True)
    if as_json:
        click.echo(to_json({"schema": "ravnest.lending/1", "told": word, "peers": told}))
    else:
        for peer in told:
            click.echo(f"{peer['name']} (process {peer['process']}) was told to {word}", err=True)


def _ask(word: str, chosen: "list[tuple[str, psutil.Process]]") -> None:
    """Show which peers would be told; go on only if that is what the user wants."""
    lent = ", ".join(f"{known} (process {process.pid})" for known, process in chosen)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        told = f"{len(chosen)} programs lend from this PC: {lent}"
        raise ConfigError(f"{told}; say which one: ravnest {word} NAME, or all: ravnest {word} --all")
    click.echo(f"this PC is lent as {lent}", err=True)
    if not click.confirm(f"{word} all of them?", err=True):
        raise click.Abort
