"""Notices: what people are told, as records, and each record as one sentence."""

from dataclasses import dataclass

from ravnest.ids import MicrobatchId, NodeId, RoundId
from ravnest.plan.sharing import ALONE, Sharing
from ravnest.plan.types import Node, Plan
from ravnest.protocol.training import Metrics


@dataclass(frozen=True, slots=True)
class HubListens:
    """The hub is open: peers can join, though the model may have to be captured first."""

    address: str


@dataclass(frozen=True, slots=True)
class DashboardOpened:
    """The run can be watched at this link; whoever has it can also stop the run."""

    link: str
    is_for_others: bool = False  # other PCs can reach it


@dataclass(frozen=True, slots=True)
class CaptureStep:
    """What is done now to turn the model of a job into a blueprint."""

    job: str
    step: str


@dataclass(frozen=True, slots=True)
class ModelCaptured:
    """The model is a blueprint, and how long that took."""

    job: str
    seconds: float
    num_parameters: int
    num_positions: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A peer joined."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class NotDialled:
    """A peer that joins listens, but the hub cannot dial it: its router or firewall lets nobody in."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Measured:
    """The speed and links of a peer that plans count on; the fault says why they were not measured."""

    node: Node
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The hub goes on from its log, or from a checkpoint."""

    num_samples: int
    num_peers: int  # to be met again


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """Training begins from the checkpoint on disk, which has learned from so many samples of the job."""

    num_samples: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A peer has found the hub again, with the state it had."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Missing:
    """The link of a peer is lost; the hub waits for it so many seconds."""

    node: NodeId
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CutOff:
    """Nobody is heard: the hub's own line is probably down; it waits so many seconds for all its peers."""

    num_peers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LogWaits:
    """The log cannot be written, and why: the hub does nothing until it can, for so many seconds at most."""

    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LogGoesOn:
    """The log is written again, after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Left:
    """A peer left, and why."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """A peer leaves as soon as others have its state."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class SpeedChanged:
    """A peer has been so many times as fast as before, for a while."""

    node: NodeId
    times: float


@dataclass(frozen=True, slots=True)
class NoiseFound:
    """How noisy gradients are, in samples; whether more clusters may pay now."""

    noise: float
    may_add_clusters: bool = False


@dataclass(frozen=True, slots=True)
class RateChanged:
    """The requester's own Adam steps so many times as far as asked, since so many clusters share batches."""

    times: float
    num_clusters: int


@dataclass(frozen=True, slots=True)
class NotEvaluated:
    """The last evaluation is left out: the cluster whose weights are kept answers, but gets nowhere."""

    cluster: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why no plan exists yet."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlanFormed:
    """A plan, and its forecast."""

    plan: Plan
    samples_per_second: float
    round_seconds: float
    batch_size: int  # samples per update
    microbatches: int  # that a batch travels as
    sharing: Sharing = ALONE
    reason: str = ""  # why it has no more clusters


@dataclass(frozen=True, slots=True)
class Repaired:
    """A repaired plan, and its reason."""

    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterStarted:
    """A cluster trains."""

    cluster: str
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class ClusterBroken:
    """A cluster stands still because a node is missing; the samples of its leases are trained again."""

    cluster: str
    reason: str
    num_given_back: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """A cluster trains again, or trains in another shape."""

    cluster: str
    seconds: float  # that it stood still
    sources: tuple[NodeId, ...]  # the nodes that gave what was missing


@dataclass(frozen=True, slots=True)
class ClusterDissolved:
    """A cluster is given up; others train the samples of its leases."""

    cluster: str
    reason: str
    num_given_back: int
    num_lost: int  # samples it trained since the last round, which nobody else knows of


@dataclass(frozen=True, slots=True)
class WorkLost:
    """The training of so many samples is lost with the peers that had it; they are trained again."""

    num_samples: int


@dataclass(frozen=True, slots=True)
class MicrobatchDropped:
    """A microbatch was lost in a stage, with these samples of the train data or of the validation data."""

    microbatch: MicrobatchId
    node: NodeId
    reason: str
    samples: tuple[int, ...] = ()
    is_evaluation: bool = False
    faulty: tuple[int, ...] = ()  # of the samples, as far as it is known already


@dataclass(frozen=True, slots=True)
class SamplesDropped:
    """These samples are at fault that their microbatch was dropped; told once."""

    samples: tuple[int, ...]
    reason: str
    is_evaluation: bool = False


@dataclass(frozen=True, slots=True)
class Trained:
    """How much of the job is trained after one more lease, and the last loss a leaf told."""

    num_samples: int
    num_total: int
    epoch: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class EpochDone:
    """Every sample of an epoch is counted; dropped ones were tried and lost."""

    epoch: int
    num_samples: int
    num_dropped: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The means over the validation samples after so many epochs, or updates, if they are counted."""

    epoch: int
    cluster: str
    num_samples: int
    loss: float | None
    metrics: Metrics
    num_updates: int = 0  # of the job


@dataclass(frozen=True, slots=True)
class SampledText:
    """What the model writes after a prompt of the job, at an evaluation."""

    epoch: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round happened, or why it did not."""

    round_id: RoundId
    is_committed: bool
    is_final: bool
    reason: str
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()  # clusters that train, but took no part
    blamed: tuple[tuple[str, int], ...] = ()  # clusters, and how many of the next rounds are without them
    unlike: tuple[tuple[str, str], ...] = ()  # clusters whose contribution was unlike all others, and how


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint is on disk."""

    num_samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NotCheckpointed:
    """A checkpoint was not made, and why; training goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointIsResult:
    """The last checkpoint is the result: all is trained in it, or nobody has what came after it."""

    num_samples: int
    num_total: int


@dataclass(frozen=True, slots=True)
class ResultKept:
    """The result is on disk. In so many other clusters nodes hold the same weights; 0: nobody could say."""

    num_agreeing: int


@dataclass(frozen=True, slots=True)
class Contradicted:
    """Two clusters find different losses for one microbatch on the same weights, and there is no third."""

    cluster: str
    other: str


@dataclass(frozen=True, slots=True)
class WorkUndone:
    """What a node says it trained does not count any more, and is trained again."""

    node: NodeId
    num_samples: int


@dataclass(frozen=True, slots=True)
class BestIsResult:
    """The best checkpoint is the result: clusters agree that the last weights are far worse."""


@dataclass(frozen=True, slots=True)
class ResultRefused:
    """What a cluster gave as the result is not what others hold."""

    reason: str


@dataclass(frozen=True, slots=True)
class WentWrong:
    """Training went wrong: it goes back to the last checkpoint, or on where there is none."""

    reason: str
    suspect: str
    goes_back: bool


@dataclass(frozen=True, slots=True)
class ClusterSuspected:
    """A cluster is unlike all others, so it is left out of so many rounds; nobody else goes back for it."""

    cluster: str
    reason: str
    num_rounds: int


@dataclass(frozen=True, slots=True)
class PauseChanged:
    """Training is paused, or goes on."""

    is_paused: bool


@dataclass(frozen=True, slots=True)
class Stopping:
    """The job ends early, and why."""

    reason: str


Notice = (
    HubListens
    | DashboardOpened
    | CaptureStep
    | ModelCaptured
    | Joined
    | NotDialled
    | Measured
    | Resumed
    | FromCheckpoint
    | Returned
    | Missing
    | CutOff
    | LogWaits
    | LogGoesOn
    | Left
    | Leaving
    | SpeedChanged
    | NoiseFound
    | RateChanged
    | NotEvaluated
    | Waiting
    | PlanFormed
    | Repaired
    | ClusterStarted
    | ClusterBroken
    | Recovered
    | ClusterDissolved
    | WorkLost
    | MicrobatchDropped
    | SamplesDropped
    | Trained
    | EpochDone
    | Evaluated
    | SampledText
    | RoundEnded
    | Checkpointed
    | NotCheckpointed
    | CheckpointIsResult
    | ResultKept
    | BestIsResult
    | Contradicted
    | WorkUndone
    | ResultRefused
    | WentWrong
    | ClusterSuspected
    | PauseChanged
    | Stopping
)
