"""Every knob and every timeout on one page, as frozen records.

Measure or derive before adding a knob. `ravnest plan --set KEY=VALUE` and the `[plan]` table of a TOML file
set the fields of PlanConfig by the names below; an unknown key is an error. Programs pass Timeouts down as
arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache, wraps
from inspect import signature
from typing import Any, Literal, TypeVar

import msgspec

from ravnest.errors import ConfigError
from ravnest.foreign import Document, Quantity, parse_table, quote, suggest
from ravnest.units import Dimension

_T = TypeVar("_T")


class WireFormat(StrEnum):
    """How numbers travel: int8 and int4 with a 4-byte scale per 256 values, the others of 4 bits per 32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"  # rounded to the nearest: only for deltas, which owe what rounding lost
    INT4_CHANNELS = "int4-channels"  # activations: a mean and scales of each channel
    INT4_STOCHASTIC = "int4-stochastic"  # gradients: rounded up or down by chance, right on average

    @property
    def bits(self) -> float:
        """Bits a value has on the wire, its share of the scales included."""
        return _BITS[self]

    @property
    def ratio(self) -> float:
        """Bytes on the wire per byte of fp32."""
        return self.bits / 32


_BITS = {
    WireFormat.FP32: 32.0,
    WireFormat.BF16: 16.0,
    WireFormat.FP16: 16.0,
    WireFormat.INT8: 8 + 32 / 256,
    WireFormat.INT4: 4 + 32 / 256,
    WireFormat.INT4_CHANNELS: 4 + 16 / 32,
    WireFormat.INT4_STOCHASTIC: 4 + 16 / 32,
}
_PLAIN_FORMATS = (WireFormat.FP32, WireFormat.BF16, WireFormat.FP16, WireFormat.INT8)
ACTIVATION_FORMATS = (*_PLAIN_FORMATS, WireFormat.INT4_CHANNELS)
GRADIENT_FORMATS = (*_PLAIN_FORMATS, WireFormat.INT4_STOCHASTIC)
DELTA_FORMATS = (*_PLAIN_FORMATS, WireFormat.INT4)
EXACT_FORMATS = (WireFormat.FP32, WireFormat.BF16)  # of gradients: coarser ones would owe too much
# What `auto` may choose, the widest first: no cost was seen beside the spread of seeds (decision 22).
AUTO_ACTIVATIONS = (WireFormat.BF16, WireFormat.INT8)
AUTO_GRADIENTS = (WireFormat.BF16, WireFormat.INT8, WireFormat.INT4_STOCHASTIC)


class WireChoice(StrEnum):
    """How activations or gradients travel: one format on all links, or the best for each (auto)."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"  # activations by channel, gradients rounded by chance


class OptimizerKind(StrEnum):
    """What updates a stage; `muon` is the default recipe (Muon on matrices, NAdam on the rest)."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    ADAMW_8BIT = "adamw8bit"  # AdamW whose moments are int8 and bf16
    NADAM = "nadam"
    RMSPROP = "rmsprop"
    ADAGRAD = "adagrad"
    ADAFACTOR = "adafactor"  # keeps two thin rows of numbers per matrix
    LION = "lion"
    MUON = "muon"

    @property
    def has_moment(self) -> bool:
        """Whether it keeps a mean of the gradients, as large as the weights."""
        return self not in (
            OptimizerKind.SGD,
            OptimizerKind.RMSPROP,
            OptimizerKind.ADAGRAD,
            OptimizerKind.ADAFACTOR,
        )

    @property
    def has_squares(self) -> bool:
        """Whether it keeps a mean of the squares of gradients, as large as the weights."""
        return self not in (
            OptimizerKind.SGD,
            OptimizerKind.MOMENTUM,
            OptimizerKind.LION,
            OptimizerKind.ADAFACTOR,
        )


class WeightFormat(StrEnum):
    """How numbers of weights are kept or computed with; the weights that are trained stay in fp32."""

    FP32 = "fp32"
    BF16 = "bf16"


class StateFormat(StrEnum):
    """How an optimizer keeps its moments; int8 has one byte of scale per 256 values."""

    AUTO = "auto"  # fp32 for an optimizer of the requester's and for exact updates, bf16 for our recipes
    FP32 = "fp32"
    BF16 = "bf16"  # first moments; squares in fp32
    INT8 = "int8"  # first moments; squares in bf16

    @property
    def ratios(self) -> tuple[float, float]:
        """Bytes of the first moment, and of the square, per byte of fp32; `auto` is bf16 without a job."""
        known = {"fp32": (1.0, 1.0), "bf16": (0.5, 1.0), "int8": ((1 + 1 / 256) / 4, 0.5)}
        return known["bf16" if self is StateFormat.AUTO else self]


class FrozenFormat(StrEnum):
    """How large matrices that are not trained are stored, sent and held; fp32 leaves all as it is given."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"  # blocks of 64 numbers share a scale of 2 bytes
    INT4 = "int4"


class Recompute(StrEnum):
    """Whether a stage runs its forward again before the backward instead of storing activations."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class CompileMode(StrEnum):
    """Whether a peer compiles its stage; `auto` does on CUDA."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"

    def applies_to(self, device: str) -> bool:
        """Return whether a stage on this device is compiled."""
        return self is CompileMode.ON or (self is CompileMode.AUTO and device.startswith("cuda"))


class Averaging(StrEnum):
    """How clusters come to agree; `auto` lets the planner choose."""

    AUTO = "auto"
    OVERLAPPED = "overlapped"  # they train on while a round averages their weights
    BLOCKING = "blocking"  # they stand still while a round averages their weights
    EXACT = "exact"  # they sum the gradients of every batch, as one process would

    @property
    def overlaps(self) -> bool:
        """Whether clusters train while a round runs, as far as is known."""
        return self in (Averaging.AUTO, Averaging.OVERLAPPED)


class Mean(StrEnum):
    """How a round makes one weight of those of all clusters."""

    AUTO = "auto"  # robust from four clusters on
    ROBUST = "robust"  # from three on: no single cluster moves it further than the others differ
    PLAIN = "plain"  # every cluster counts by its samples, whatever it brings

    def is_robust(self, num_running: int, num_present: int) -> bool:
        """Return whether a round of so many clusters, of those that run, is robust."""
        if self is Mean.PLAIN or num_present < 3:
            return False
        return self is Mean.ROBUST or num_running >= 4


class Favour(StrEnum):
    """What a plan with more clusters may cost."""

    QUALITY = "quality"  # hardly anything: a sample trains at least 0.9 as much as in one process
    SPEED = "speed"  # a little: 0.8 as much

    @property
    def least_efficiency(self) -> float:
        """The training effect of a sample, in that of one process, below which no cluster is added."""
        return 0.9 if self is Favour.QUALITY else 0.8


def with_known_settings(record: type[_T]) -> type[_T]:
    """Let a dataclass that people make by keywords tell what is misspelt."""
    make = record.__init__
    known = list(signature(make).parameters)[1:]

    @wraps(make)
    def make_known(self: _T, *values: Any, **settings: Any) -> None:
        for name in settings:
            if name not in known:
                problem = f"{record.__name__} has no setting {quote(name)}"
                raise ConfigError(f"{problem}; {suggest(name, known)}")
        make(self, *values, **settings)

    record.__init__ = make_known  # type: ignore[assignment]
    return record


@with_known_settings
@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What the planner may assume and how it weighs things."""

    optimizer: OptimizerKind = OptimizerKind.MUON
    predict_weights: bool = True  # one more copy of the weights in every stage but the last
    max_lag: int = 2  # updates a microbatch may be late; accumulation keeps this bound
    saves_memory: bool = True  # stages may do without prediction, and with a lag of 1, where memory is short
    keeps_ema: bool = False  # one more copy of the weights: their mean over time; a job says so
    accumulates: bool = False  # updates are sums over microbatches: one more copy of the gradients
    versions: WeightFormat = WeightFormat.BF16  # of weights that microbatches in flight have seen
    states: StateFormat = StateFormat.AUTO  # of the optimizer
    precision: WeightFormat = WeightFormat.FP32  # of matrix products; a job says which
    frozen: FrozenFormat = FrozenFormat.FP32  # of large matrices that are not trained
    recompute: Recompute = Recompute.AUTO
    activations: WireChoice = WireChoice.AUTO
    gradients: WireChoice = WireChoice.AUTO
    deltas: WireFormat = WireFormat.INT4
    exact_gradients: WireFormat = WireFormat.FP32  # in gradient rounds: fp32 or bf16
    averaging: Averaging = Averaging.AUTO
    mean: Mean = Mean.AUTO  # of a round; a job may say which
    clusters: int = 0  # at most so many, whatever that costs in quality; 0: as many as pay
    favour: Favour = Favour.QUALITY
    averaging_share: float = 0.1  # of each link (overlapped) or of the time (blocking)
    max_round_seconds: float = 600.0  # no node hosts more than it can average in this time
    max_relayed_round_seconds: float = 3600.0  # and no plan sends more of a round through the hub
    speed_ratio: float = 4.0  # fastest over slowest cluster; a faster one is held back to it
    max_stages: int = 48
    max_window: int = 128
    in_flight_per_hop: int = 10  # microbatches in flight for each stage after this one
    relay_bytes_per_second: float = 2.5e6  # per pair of neighbours that only the hub can connect
    hub_bytes_per_second: float = 0.0  # its upload, for samples, first weights and relay; 0: not counted
    overhead_bytes: float = 5e8  # the program itself and the device's context
    recover_seconds: float = 30.0  # a cluster stands still when one of its nodes dies
    microbatch_seconds: float = 2e-3  # a stage needs at least this for a microbatch, however small the model

    def __post_init__(self) -> None:
        if self.deltas not in DELTA_FORMATS:
            raise ConfigError(f"deltas is {self.deltas}; choose one of {', '.join(DELTA_FORMATS)}")
        for name, known in (("activations", ACTIVATION_FORMATS), ("gradients", GRADIENT_FORMATS)):
            choice = getattr(self, name)
            if isinstance(choice, WireFormat):
                if choice not in (*known, WireFormat.INT4):
                    raise ConfigError(f"{name} is {choice}; choose one of {', '.join(WireChoice)}")
                object.__setattr__(self, name, WireChoice(choice.partition("-")[0]))

    @property
    def activation_formats(self) -> tuple[WireFormat, ...]:
        """How activations may travel, the widest first."""
        return _formats(self.activations, AUTO_ACTIVATIONS, WireFormat.INT4_CHANNELS)

    @property
    def gradient_formats(self) -> tuple[WireFormat, ...]:
        """How gradients may travel, the widest first."""
        return _formats(self.gradients, AUTO_GRADIENTS, WireFormat.INT4_STOCHASTIC)


def _formats(choice: WireChoice, auto: tuple[WireFormat, ...], int4: WireFormat) -> tuple[WireFormat, ...]:
    if choice is WireChoice.AUTO:
        return auto
    return (int4 if choice is WireChoice.INT4 else WireFormat(choice),)


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """How long the planner searches, counted in clusters it evaluates."""

    clusters: int = 8_000  # per neighbourhood; fewer when each cluster is long and finely cut
    quick_clusters: int = 2_000  # for one more cluster while training goes on
    complete_nodes: int = 12  # of so few, all subsets are tried


SEARCH_BUDGET = SearchBudget()


@dataclass(frozen=True, slots=True)
class ReserveLimits:
    """How much a cluster has ahead of the leases it is at, for a hub that is away."""

    seconds: float = 120.0  # of work, at the rate that is foreseen
    most_bytes: float = 64e6  # of samples in one PC, at most: no more than fits beside its stage
    most_microbatches: int = 2048  # the hub hears of each of them when it is back
    most_repeated: int = 4096  # messages about its work that a peer says again


RESERVE = ReserveLimits()


@dataclass(frozen=True, slots=True)
class HandoverTimeouts:
    """How a node leaves without losing work; the hub and its peers must use the same numbers."""

    total_seconds: float = 10.0  # a leaving node stays at most this long
    drain_seconds: float = 5.0  # of these, its cluster may finish what is under way


HANDOVER = HandoverTimeouts()


@dataclass(frozen=True, slots=True)
class HubTimeouts:
    """How long the hub waits. A log must be replayed with the timeouts it was written with."""

    # The server and its links to peers.
    grace_seconds: float = 3.0  # a peer whose link is lost may come back within this time
    parting_seconds: float = 5.0  # at the end, peers have this long to leave
    remind_every_seconds: float = 60.0  # a hub that has no plan says why again
    quiet_upload_seconds: float = 60.0  # an upload that stands still for so long is given up
    generation_seconds: float = 60.0  # a cluster names the next token within this time, or another is asked
    # Membership and planning.
    probe_seconds: float = 15.0  # a new node is measured within this time, or its own claims count
    join_seconds: float = 2.0  # nodes seldom come alone: new ones are used after this much quiet
    replan_seconds: float = 5.0  # a plan that replaces the first one waits for this much quiet, at most
    handover: HandoverTimeouts = HANDOVER
    return_seconds: float = 20.0  # after a restart of the hub, members have this long to find it
    together_seconds: float = 2.0  # links that one fault ends are lost within this time
    cut_off_seconds: float = 600.0  # a hub that hears nobody waits this long for all its members
    # Liveness: a node that answers pings may still do nothing.
    silent_work_seconds: float = 60.0  # a busy cluster is questioned after this much silence, at least
    silent_build_seconds: float = 300.0  # a stage under construction may be silent for so long, and more
    speed_reading_seconds: float = 5.0  # one reading of a node's speed is a mean over this time
    speed_change_seconds: float = 20.0  # another speed is believed after this time
    # Rounds, backups and checkpoints.
    round_seconds: float = 10.0  # a round may take this long, and four times its forecast
    round_verdict_seconds: float = 5.0  # after the first abort, the others have this long to report
    backup_every_seconds: float = 30.0  # spares get new backups at this interval, at most
    snapshot_seconds: float = 120.0  # the nodes of a cluster write a checkpoint within this time
    check_seconds: float = 30.0  # a round waits so long for losses that others find again; 0: nobody does
    sketch_seconds: float = 30.0  # other clusters say within this time which weights they have
    # The end of a job.
    stop_seconds: float = 30.0  # a stopped job finishes what is under way within this time
    end_seconds: float = 30.0  # broken clusters may recover for so long before the last round


@dataclass(frozen=True, slots=True)
class PeerTimeouts:
    """How long a peer waits."""

    parting_seconds: float = 2.0  # the hub hears within this time that the peer leaves
    handover: HandoverTimeouts = HANDOVER
    quiet_download_seconds: float = 30.0  # a download that stands still for so long is given up
    relay_after_seconds: float = 3.0  # two peers without a direct link meet at the relay after this
    look_seconds: float = 5.0  # two that met at the relay then look for the straight way; this doubles
    look_later_seconds: float = 60.0  # up to this
    give_up_seconds: float = 20.0  # a peer reports a neighbour it cannot reach after this
    give_up_later_seconds: float = 5.0  # the other one of the two waits so much longer
    report_every_seconds: float = 5.0  # a stage reports at least this often while it works
    ask_again_seconds: float = 1.0  # an averager repeats an unanswered question after this
    compile_seconds: float = 1800.0  # a stage that is not compiled after this runs uncompiled for good
    compute_start_seconds: float = 600.0  # compute has loaded torch and looked at its device after this
    compute_end_seconds: float = 5.0  # compute that has closed the border by itself ends within this time
    compute_query_seconds: float = 30.0  # between two questions whether compute is still at work
    compute_silence_seconds: float = 900.0  # compute that finishes nothing for so long is ended
    crash_window_seconds: float = 600.0  # crashes of compute on one stage within this time are too many


@dataclass(frozen=True, slots=True)
class NetTimeouts:
    """How long a transport, a link or the relay waits."""

    tick_seconds: float = 0.4  # a link sends something at least every second tick
    silence_seconds: float = 1.4  # a link is dead after this silence; with one tick, within 2 s
    most_patience: int = 8  # times as long, where a neighbour was thought dead and came back: it is only busy
    forgive_seconds: float = 60.0  # a link that holds so long halves its patience again
    ack_seconds: float = 0.01  # a confirmation waits so long for a chunk to travel with
    dial_seconds: float = 2.0  # one address has this long to answer; well within the hub's grace
    longest_dial_seconds: float = 16.0  # this doubles with each pass: who is dialled by many needs longer
    first_pause_seconds: float = 0.1  # before the second pass over a peer's addresses; then it doubles
    longest_pause_seconds: float = 5.0  # between two passes
    good_link_seconds: float = 1.0  # a link that lived longer was a good one, so pauses start anew
    send_seconds: float = 60.0  # a message without credit for so long is an error
    flush_seconds: float = 0.25  # at the end, goodbyes have this long to leave
    handshake_seconds: float = 5.0  # a connection proves its key within this time
    relay_opening_seconds: float = 5.0  # a stream at the relay opens within this time
    relay_pause_seconds: float = 1.0  # between two attempts to reach the relay
    relay_keepalive_seconds: int = 30  # routers forget streams that are silent for longer


@dataclass(frozen=True, slots=True)
class ProgramTimeouts:
    """How long sessions and commands wait, and how often they look or print."""

    settle_seconds: float = 5.0  # without a number of nodes, a job starts after this much quiet
    local_end_seconds: float = 5.0  # local peers have this long to end before they are killed
    progress_every_seconds: float = 10.0  # between two lines of progress
    redraw_seconds: float = 0.25  # between two pictures of the live view
    lending_look_seconds: float = 1.0  # between two looks at hours, battery and memory of a lent PC
    doctor_seconds: float = 5.0  # the doctor waits so long for a hub
    mirror_seconds: float = 30.0  # a mirror of weights may be silent so long
    channel_request_seconds: float = 10.0  # a request to a running hub is made within this time
    channel_answer_seconds: float = 600.0  # the next piece of its answer is here within this time
    lending_page_look_seconds: float = 2.0  # between two looks of a provider's page at what the PC does
    gpu_answer_seconds: float = 5.0  # the program that knows of a GPU answers within this time
    log_look_seconds: float = 0.5  # between two looks at a log that is followed
    page_every_seconds: float = 0.5  # between two updates of a page
    page_answer_seconds: float = 2.0  # a page waits so long for the hub, then shows what was last known
    page_keepalive_seconds: float = 15.0  # a stream of updates is never silent for longer
    page_end_seconds: float = 3.0  # at the end, pages have this long to hear of it
    text_look_seconds: float = 1.0  # who waits for a text looks so often whether the training goes on
    reader_end_seconds: float = 5.0  # until a reader whose pipe is closed has an exit code


@dataclass(frozen=True, slots=True)
class StoreTimeouts:
    """How long a hub waits for a log in PostgreSQL and for a bucket."""

    connect_seconds: float = 5.0  # a server answers who dials it within this time
    answer_seconds: float = 10.0  # what is sent to the log is written within this time, or sent again
    pause_seconds: float = 1.0  # between two tries
    start_seconds: float = 30.0  # a hub that goes on waits so long for a server that just starts
    patience_seconds: float = 600.0  # as long as peers wait for a hub; then it ends
    bucket_seconds: float = 30.0  # a bucket may be silent so long


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Every timeout of the package, by the part that waits."""

    hub: HubTimeouts = HubTimeouts()
    peer: PeerTimeouts = PeerTimeouts()
    net: NetTimeouts = NetTimeouts()
    program: ProgramTimeouts = ProgramTimeouts()
    store: StoreTimeouts = StoreTimeouts()


TIMEOUTS = Timeouts()

_DIMENSIONS = {
    "max_round_seconds": Dimension.SECONDS,
    "max_relayed_round_seconds": Dimension.SECONDS,
    "relay_bytes_per_second": Dimension.BYTES_PER_SECOND,
    "hub_bytes_per_second": Dimension.BYTES_PER_SECOND,
    "overhead_bytes": Dimension.BYTES,
    "recover_seconds": Dimension.SECONDS,
    "microbatch_seconds": Dimension.SECONDS,
}
_BOUNDS = {
    "max_lag": (1, 64),
    "averaging_share": (0.001, 0.9),
    "max_round_seconds": (1, 1e9),
    "max_relayed_round_seconds": (1, 1e9),
    "speed_ratio": (1, 1e6),
    "max_stages": (1, 256),
    "max_window": (1, 1024),
    "in_flight_per_hop": (1, 64),
    "relay_bytes_per_second": (1e3, 1e12),
    "hub_bytes_per_second": (0, 1e12),
    "overhead_bytes": (0, 1e12),
    "recover_seconds": (0, 1e6),
    "clusters": (0, 10_000),
    "microbatch_seconds": (0, 60),
}


def parse_plan_table(text: str, where: str) -> dict[str, object] | None:
    """Return the [plan] table of a TOML file; None if it has none."""
    document = parse_table(text, where)
    table = document.values.get("plan")
    if not isinstance(table, dict | None):
        document.refuse(("plan",), f"is {quote(table)}, not a table; write [plan]")
    return table


def read_plan_config(table: Mapping[str, object], where: str, base: PlanConfig | None = None) -> PlanConfig:
    """Return the default PlanConfig, or `base`, with the keys of `table` set; errors name `where`."""
    read = Document(dict(table), where, is_table=True).read_as(_plan_table())
    return replace(base or PlanConfig(), **{name: _plain(name, getattr(read, name)) for name in table})


def _plain(name: str, value: Any) -> Any:
    kind = type(getattr(PlanConfig(), name))
    return value in (True, "true") if kind is bool else kind(value)


@cache
def _plan_table() -> type[msgspec.Struct]:
    """Return the schema of a [plan] table; every key may be left out."""
    keys = [(field.name, _kind_of(field.name, field.default), field.default) for field in fields(PlanConfig)]
    return msgspec.defstruct("_PlanTable", keys, forbid_unknown_fields=True)


def _kind_of(name: str, default: Any) -> Any:
    if name == "deltas":
        make_enum: Any = StrEnum
        return make_enum("Format", {each.name: each.value for each in DELTA_FORMATS})
    if isinstance(default, StrEnum):
        return type(default)
    if isinstance(default, bool):
        return bool | Literal["true", "false"]  # the words of a command line
    low, high = (f"{end:g}" for end in _BOUNDS[name])

    class Knob(
        Quantity,
        low=low,
        high=high,
        dimension=_DIMENSIONS.get(name),
        example="" if name in _DIMENSIONS else f"{default:g}",
        is_whole=isinstance(default, int),
        takes_text=True,
    ): ...

    return Knob
