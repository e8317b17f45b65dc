"""Events, which enter the coordinator and its log, and actions, which it wants done.

Telemetry is no event: hub.monitors turn it into conclusions, which are. Every event has the hub's time.
"""

from dataclasses import dataclass, replace

from ravnest.config import Mean, PlanConfig
from ravnest.hub.coordinator.checks import NOT_COMPARED, NodeSketch, Verdict
from ravnest.hub.coordinator.leases import LedgerState
from ravnest.hub.coordinator.notices import EpochDone, Evaluated, Notice, SampledText
from ravnest.ids import LeaseId, MicrobatchId, NodeId, RoundId
from ravnest.plan.sharing import ALONE, Sharing, TrainingLength
from ravnest.plan.types import ModelProfile, Node, Plan
from ravnest.protocol.membership import Fact
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.placement import BlobRef


@dataclass(frozen=True, slots=True)
class MakePlan:
    """An action: form a plan of this number with these nodes, or repair one; then say PlanMade."""

    plan_id: int
    nodes: tuple[Node, ...]
    repairs: Plan | None = None
    gone: tuple[Node, ...] = ()  # nodes of that plan that are no longer here
    changed: tuple[Node, ...] = ()  # nodes that have changed since that plan, as it knows them
    microbatches: int = 0  # of it
    sharing: Sharing = ALONE  # of it
    noise: float | None = None  # the job's noise scale in samples, once measured
    tries_spares: bool = False  # spares that could not help before may help now
    building: tuple[NodeId, ...] = ()  # roots of clusters of that plan that are being built
    untried: tuple[NodeId, ...] = ()  # spares that came when clusters were being built


@dataclass(frozen=True, slots=True)
class PlanMade:
    """What a MakePlan asked for, or what these nodes are short of."""

    plan_id: int
    plan: Plan | None
    microbatches: int
    shortage: str
    now: float
    reason: str = ""  # what a repair does
    sharing: Sharing = ALONE


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found of a peer; None is what it did not find."""

    node: NodeId
    flops_per_second: float | None
    upload_bytes_per_second: float | None
    download_bytes_per_second: float | None
    latency_seconds: float | None
    now: float


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What is trained, how long, and when the swarm is formed."""

    num_samples: int
    num_validation: int
    batch_size: int  # of one update; it travels as microbatches
    epochs: int  # begun at most, the last one maybe not to its end
    rates: tuple[float, ...]  # the learning rate over all batches of the job, spread evenly
    seed: int = 0
    shuffle_window: int = 0  # samples are shuffled within windows of so many; 0: all of an epoch together
    max_batches: int = 0  # of the job; 0: those of all epochs
    chunk_batches: int = 8  # per lease, at most
    least_samples: int = 4  # of a microbatch, where it is chosen
    microbatches: int = 0  # a batch travels as so many; 0: chosen with the plan
    is_whole_batch: bool = False  # the loss is of a whole batch: no part of one is trained alone
    average_every: int | None = None  # batches per cluster between rounds; None: as often as they fit
    evaluate_every: int = 1  # epochs; 0: only at the end
    evaluate_updates: int = 0  # of the job between two evaluations; 0: by epochs
    checkpoint_every: float | None = None  # seconds; None: never
    keeps_last: bool = False  # what all take with them who leave at once; as before there was a choice
    has_own_adam: bool = False  # the requester's: its rate follows the noise where clusters share batches
    has_statistics: bool = False  # of batches, as a batch norm has: small shares train it worse
    has_tied_weights: bool = False  # that several positions of the line share
    expected_nodes: int = 0  # with so many nodes form at once; 0: only by time
    settle_seconds: float = 5.0  # form when nobody came or went for so long
    most_snapshot_bytes: int = 2**62  # of a stage, however it is cut
    draw_seed: int = 0  # of lots; peers do not know it
    mean: Mean = Mean.PLAIN  # of rounds; as before there was a choice
    reserve_seconds: float = 0.0  # of work that a cluster has ahead, for a hub that is away; 0: none
    reserve_samples: int = 2**62  # of a cluster, at most
    metrics: tuple[str, ...] | None = None  # that leaves report beside the loss; None: not known, as once

    @property
    def length(self) -> TrainingLength:
        """What the quality of a shared training depends on."""
        return TrainingLength(
            self.batch_size,
            self.num_batches,
            self.average_every,
            self.is_whole_batch,
            has_statistics=self.has_statistics,
        )

    def are_of_the_job_of(self, logged: "JobSettings") -> bool:
        """Return whether a log is of this job, whatever swarm and reserve are; old ones have no metrics."""
        names = ("expected_nodes", "settle_seconds", "draw_seed", "reserve_seconds", "reserve_samples")
        free = [*names, *(["metrics"] if logged.metrics is None else [])]
        return replace(self, **{name: getattr(logged, name) for name in free}) == logged

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one pass over the data, the last one maybe smaller."""
        return -(-self.num_samples // self.batch_size)

    @property
    def num_batches(self) -> int:
        """Batches of the whole job."""
        return self.max_batches or self.epochs * self.batches_per_epoch

    @property
    def num_total(self) -> int:
        """Samples of the whole job, each as often as it is trained."""
        return self.samples_of(self.num_batches)

    def epoch_size(self, epoch: int) -> int:
        """Return how many samples an epoch has, counted from 0: the last one may end early."""
        return max(0, min(self.num_samples, self.num_total - epoch * self.num_samples))

    def position(self, num_samples: int) -> int:
        """Return the whole batches trained when so many samples of the job were."""
        return num_samples * self.batches_per_epoch // self.num_samples

    def samples_of(self, batches: int) -> int:
        """Return the samples of so many batches, from the first of the job on."""
        epochs, more = divmod(batches, self.batches_per_epoch)
        return epochs * self.num_samples + more * self.batch_size

    def rate(self, batch: int) -> float:
        """Return the learning rate when so many batches were trained before."""
        index = batch * len(self.rates) // self.num_batches
        return self.rates[min(index, len(self.rates) - 1)]


@dataclass(frozen=True, slots=True)
class JobGiven:
    """The requester's job; a hub has one."""

    profile: ModelProfile
    config: PlanConfig
    settings: JobSettings
    now: float
    books: LedgerState | None = None  # of the checkpoint it goes on from

    def profile_microbatch(self, microbatches: int, sharing: Sharing) -> ModelProfile:
        """Return the profile of a job whose batches, or shares of a batch, travel in so many pieces."""
        num_shares = sharing.num_clusters if sharing.is_split else 1
        return self.profile.resize_batch(-(-self.settings.batch_size // (microbatches * num_shares)))

    def configure_microbatch(self, microbatches: int, sharing: Sharing) -> PlanConfig:
        """Return what the planner assumes when batches travel in so many pieces."""
        return replace(self.config, accumulates=microbatches > 1, averaging=sharing.averaging)


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A peer said Hello and its proof held."""

    node: Node
    key: str
    addresses: tuple[str, ...]
    now: float
    guessed: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Restarted:
    """The hub goes on from its log: all members are to come back. `books` are of the last checkpoint."""

    books: LedgerState | None
    now: float


@dataclass(frozen=True, slots=True)
class PeerReturned:
    """A member comes back after the hub was away, with what it had."""

    node: NodeId
    addresses: tuple[str, ...]
    now: float


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A peer is gone: its link broke, it is silent, it sent garbage."""

    node: NodeId
    reason: str
    now: float
    since: float | None = None  # it was last heard of


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a peer, by the name its key proves."""

    sender: NodeId
    message: Message
    now: float


@dataclass(frozen=True, slots=True)
class PartsMade:
    """What a MakeParts asked for; a stage of this interval consumes these fields of a batch.

    Weights that the hub does not give as a whole are None: its own are made by segment.
    """

    start: int
    stop: int
    blueprint: BlobRef
    weights: BlobRef | None
    train_fields: tuple[str, ...]
    evaluation_fields: tuple[str, ...]
    now: float


@dataclass(frozen=True, slots=True)
class Collected:
    """All that the Collect of this number names is on disk; or why not."""

    number: int
    now: float
    fault: str = ""
    verdict: Verdict = NOT_COMPARED  # what others say of these weights


@dataclass(frozen=True, slots=True)
class SamplesInspected:
    """What an InspectSamples asked for: the samples that fail alone, and why; none if it is not known."""

    is_evaluation: bool
    samples: tuple[int, ...]
    faulty: tuple[tuple[int, str], ...]
    now: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; only needed when it reaches `due`."""

    now: float


@dataclass(frozen=True, slots=True)
class Stopped:
    """The requester ends the job early: nothing more is leased, and what was trained is kept."""

    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class PauseAsked:
    """The requester pauses the training, or goes on with it."""

    is_paused: bool
    now: float


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """The requester wants a checkpoint now, whenever the next one is due."""

    now: float


@dataclass(frozen=True, slots=True)
class TextsSampled:
    """What the model writes after the prompts of the job, once an evaluation is over."""

    texts: tuple[SampledText, ...]
    now: float


MetricSum = tuple[str, float, int]  # a name ("loss", or a metric's), a sum over samples, and how many


@dataclass(frozen=True, slots=True)
class ClusterVersion:
    """How many updates a cluster has made, as its leaf reports."""

    cluster_id: str
    version: int
    num_reported: int  # samples that all clusters had reported when it came to that version


@dataclass(frozen=True, slots=True)
class TrainingReported:
    """Telemetry that the books need, at the end of a lease and when a round is due.

    Numbers are totals, not increments: an event that is lost with its hub costs nothing later.
    """

    num_reported: int  # samples of the job whose loss is known, of all clusters
    loss: float | None  # of the last microbatch
    sums: tuple[tuple[int, MetricSum], ...]  # by epoch, from 0, of epochs that are under way
    versions: tuple[ClusterVersion, ...]  # of clusters that have made updates since they were last named
    now: float


@dataclass(frozen=True, slots=True)
class EvaluationReported:
    """All microbatches of an evaluation lease are reported or dropped."""

    cluster_id: str
    lease: LeaseId
    num_samples: int  # of those that were reported
    sums: tuple[MetricSum, ...]
    now: float


@dataclass(frozen=True, slots=True)
class LossClaimed:
    """The loss of the first microbatch that a cluster began after a round, on the average of that round.

    None: it says that it saw other weights, though all clusters stood still.
    """

    cluster_id: str
    microbatch: MicrobatchId
    anchor_round: RoundId
    loss: float | None
    now: float


@dataclass(frozen=True, slots=True)
class LossRechecked:
    """The loss that another cluster finds for such a microbatch; None: it has that average no more."""

    cluster_id: str  # nothing: nobody got the samples, which are not the same when they are read again
    microbatch: MicrobatchId  # the number it has there
    loss: float | None
    now: float


@dataclass(frozen=True, slots=True)
class SpeedMeasured:
    """A node has been so many times as fast as the plan knows it, for long."""

    node: NodeId
    times: float
    now: float


@dataclass(frozen=True, slots=True)
class ClusterSlowed:
    """A cluster has been so many times as fast as before, for long: perhaps one of its links is slow."""

    cluster_id: str
    times: float
    now: float


@dataclass(frozen=True, slots=True)
class NoiseMeasured:
    """The noise scale of the job's gradients, in samples: the first one, or one that is clearly larger."""

    noise: float
    now: float


@dataclass(frozen=True, slots=True)
class LossAlarm:
    """Training goes wrong: what was seen, and at which node or cluster."""

    reason: str
    suspect: str
    now: float


@dataclass(frozen=True, slots=True)
class ClusterUnlike:
    """A cluster goes wrong alone: what was seen of it, that most others do not share."""

    cluster_id: str
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class CalmChanged:
    """Whether the present weights are worth a checkpoint, as the losses say."""

    is_calm: bool
    now: float


@dataclass(frozen=True, slots=True)
class ClusterSilent:
    """A cluster that has something to do has reported nothing since then."""

    cluster_id: str
    since: float
    now: float


@dataclass(frozen=True, slots=True)
class ClusterHeard:
    """A cluster that was asked why it is silent reports again."""

    cluster_id: str
    now: float


Conclusion = (
    TrainingReported
    | EvaluationReported
    | LossClaimed
    | LossRechecked
    | SpeedMeasured
    | ClusterSlowed
    | NoiseMeasured
    | LossAlarm
    | ClusterUnlike
    | CalmChanged
    | ClusterSilent
    | ClusterHeard
)
Event = (
    JobGiven
    | Restarted
    | PeerJoined
    | PeerReturned
    | PeerLeft
    | Received
    | PlanMade
    | PartsMade
    | Collected
    | SamplesInspected
    | Tick
    | Stopped
    | CheckpointAsked
    | PauseAsked
    | TextsSampled
    | Probed
    | Conclusion
)


@dataclass(frozen=True, slots=True)
class Send:
    """An action: send a message to a peer."""

    to: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class MakeParts:
    """An action for the requester's side: cut this interval of the line and store its two blobs."""

    start: int
    stop: int
    has_weights: bool = True  # else its weights are not needed


@dataclass(frozen=True, slots=True)
class SendFields:
    """An action for the data service: the fields of each microbatch, to the stages that consume them."""

    build_id: int
    lease: LeaseId
    is_evaluation: bool
    first_microbatch: MicrobatchId
    samples: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[NodeId, tuple[str, ...]], ...]
    checks: MicrobatchId | None = (
        None  # only if they are what was sent for this microbatch: data may be random
    )


@dataclass(frozen=True, slots=True)
class InspectSamples:
    """An action for the requester's side: find which of these samples fail; then say SamplesInspected."""

    is_evaluation: bool
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """The state of an interval of the line, and the node that serves it."""

    start: int
    stop: int
    node: NodeId
    weights: BlobRef


@dataclass(frozen=True, slots=True)
class Collect:
    """An action: fetch these blobs from their nodes, write them as a checkpoint or result; say Collected."""

    number: int
    parts: tuple[CheckpointPart, ...]
    books: LedgerState
    is_result: bool = False  # what the requester gets; a checkpoint may fail
    evaluated: Evaluated | None = None  # this very state, and it is the best so far
    key: bytes = b""  # of the sketches
    others: tuple[NodeSketch, ...] = ()  # sketches that nodes of other clusters made of the same average


@dataclass(frozen=True, slots=True)
class WithdrawCollect:
    """An action: do not keep what this Collect fetches; Collected has that as its fault."""

    number: int


@dataclass(frozen=True, slots=True)
class Evict:
    """An action: tell a peer that is no member any more that it may go, or must for what it did."""

    to: NodeId
    reason: str
    is_fault: bool = False  # it lied: its key may not come again, and its guest gets a strike


@dataclass(frozen=True, slots=True)
class Notify:
    """An action: show this to people."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class Finish:
    """An action: the result is on disk; without parts, the last checkpoint is the result, or the best one."""

    parts: tuple[CheckpointPart, ...]
    history: tuple[EpochDone | Evaluated, ...]
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Abandon:
    """An action: the job is over and there is nothing to keep; say why."""

    reason: str
    is_guarded: bool = False  # what was trained went wrong; a checkpoint may be on disk


Action = (
    Send
    | Evict
    | MakePlan
    | MakeParts
    | SendFields
    | InspectSamples
    | Collect
    | WithdrawCollect
    | Notify
    | Finish
    | Abandon
    | Refusal
)
