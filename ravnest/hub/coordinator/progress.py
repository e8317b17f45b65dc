"""How far each cluster is: updates made, samples learned from, rates sent, and the average it began from.

A cluster that is built anew goes on from another one. Rates are sent ahead of a cluster's updates. In exact
mode clusters train a batch together: their shares wait here until they are summed. What cannot be trained is
dropped, a whole microbatch at a time. The requester's side is asked which of its samples is at fault; from
then on another one of its microbatch takes its place. Training does not wait for the answer.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ravnest.hub.coordinator.events import (
    Action,
    ClusterVersion,
    InspectSamples,
    JobSettings,
    Notify,
    SamplesInspected,
    Send,
    SendFields,
)
from ravnest.hub.coordinator.leases import OpenLease
from ravnest.hub.coordinator.notices import MicrobatchDropped, RateChanged, SamplesDropped
from ravnest.hub.coordinator.phases import ClusterPhase
from ravnest.hub.coordinator.placement import ClusterState, Placement
from ravnest.ids import RoundId
from ravnest.protocol.training import LearningRate

_NONE = RoundId(0)  # before the first round


@dataclass(slots=True)
class Progress:
    """How far one cluster is."""

    version: int
    position: int = 0  # batches that all clusters had trained when it came to that version
    rates: dict[int, float] = field(default_factory=dict)  # sent, by the update they hold from
    num_trained: int = 0  # samples
    num_alone: int = 0  # of them since the last round
    agreed_version: int = 0  # updates it had made at the last round
    num_samples_seen: int = 0  # samples of all clusters that its weights have learned from
    anchor_round: RoundId | None = _NONE  # the round whose average it began from; None: it has none
    is_fed: bool = False  # it has missed a round, and got the average of that from another cluster


class ClusterProgress:
    """Knows every cluster by its cluster_id, also those whose state a node still holds."""

    def __init__(self, settings: JobSettings, num_reported: int) -> None:
        self._settings = settings
        self._position = settings.position(num_reported)
        self._progress: dict[str, Progress] = {}

    def __len__(self) -> int:
        return len(self._progress)

    def version(self, cluster: ClusterState) -> int:
        """Return how many updates a cluster has made, as far as is known."""
        progress = self._progress.get(cluster.cluster_id)
        return cluster.version if progress is None else progress.version

    def knows(self, cluster: ClusterState) -> bool:
        """Return whether a cluster's weights have learned anything."""
        progress = self._progress.get(cluster.cluster_id)
        return progress is not None and bool(progress.anchor_round or progress.num_trained > 0)

    def has_trained(self, cluster: ClusterState) -> bool:
        """Return whether a cluster, or one that it goes on from, has trained anything."""
        return self._of(cluster).num_trained > 0

    def samples_seen(self, cluster: ClusterState) -> int:
        """Return how many samples, of all clusters, one's weights have learned from."""
        return self._of(cluster).num_samples_seen

    def count_alone(self, cluster: ClusterState) -> tuple[int, int]:
        """Return the updates a cluster reports since its last round, and the samples that are counted."""
        progress = self._of(cluster)
        return max(0, progress.version - progress.agreed_version), progress.num_alone

    def most_trained(self, clusters: Iterable[ClusterState]) -> ClusterState:
        """Return the cluster whose weights saw most samples; of equals, the one that trained most."""
        return max(clusters, key=lambda each: (self.samples_seen(each), self._of(each).num_trained))

    def find_fellows(self, clusters: Sequence[ClusterState]) -> tuple[ClusterState, ...]:
        """Return the clusters that share the newest average; what each says it trained since is no matter.

        Before the first average they are those that have learned anything; if none has, all.
        """
        known = [each for each in clusters if self.knows(each)]
        shared = {
            each.cluster_id: self._of(each).num_samples_seen - self._of(each).num_alone for each in known
        }
        newest = max(shared.values(), default=0)
        return tuple(each for each in known if shared[each.cluster_id] == newest) or tuple(clusters)

    def is_fed(self, cluster: ClusterState) -> bool:
        """Return whether a cluster's average once came from another one: if it is false, so was that one."""
        return self._of(cluster).is_fed

    def holds(self, cluster: ClusterState, anchor_round: RoundId) -> bool:
        """Return whether a cluster has the average of this round."""
        return self._of(cluster).anchor_round == anchor_round

    def anchor_round(self, clusters: Iterable[ClusterState]) -> RoundId | None:
        """Return the newest round whose average one of these clusters has, if any; 0: the first weights."""
        anchor_rounds = (self._of(cluster).anchor_round for cluster in clusters)
        return max((anchor_round for anchor_round in anchor_rounds if anchor_round is not None), default=None)

    def forget_averages(self, clusters: Iterable[ClusterState]) -> None:
        """Record that neither these clusters nor those before them keep the average of a round any more."""
        for progress in (*map(self._of, clusters), *self._progress.values()):
            progress.anchor_round = None

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget all clusters but these."""
        self._progress = {each: far for each, far in self._progress.items() if each in cluster_ids}

    def inherit(self, cluster: ClusterState, cluster_id: str, is_whole: bool) -> None:
        """Record that a cluster goes on from another, with its average if it has its whole state."""
        before = self._progress.get(cluster_id) or Progress(0, self._position, anchor_round=None)
        version = max(1, before.version)  # 0 is for what the hub gave, the same in all stages
        after = Progress(version, self._position, num_trained=before.num_trained)
        after.num_samples_seen = before.num_samples_seen
        after.anchor_round = before.anchor_round if is_whole else None
        after.num_alone = before.num_alone if is_whole else 0
        after.agreed_version = before.agreed_version if is_whole else version
        cluster.version, self._progress[cluster.cluster_id] = version, after

    def end(self, cluster: ClusterState) -> int:
        """Record that a cluster ends; return the samples that it alone has seen."""
        progress = self._of(cluster)
        progress.anchor_round = None  # its nodes may get other weights before a cluster goes on from it
        return progress.num_alone

    def record_trained(self, cluster: ClusterState, num_samples: int) -> None:
        """Record samples that a cluster has trained."""
        progress = self._of(cluster)
        progress.num_trained += num_samples
        progress.num_alone += num_samples
        progress.num_samples_seen += num_samples

    def record_versions(self, versions: Iterable[ClusterVersion], num_reported: int) -> int:
        """Record how far clusters are, and all of them together; return how many updates are new."""
        self._position = self._settings.position(num_reported)
        num_updates = 0
        for found in versions:
            progress = self._progress.get(found.cluster_id)
            if progress is not None and found.version > progress.version:
                num_updates += found.version - progress.version
                progress.version = found.version
                progress.position = self._settings.position(found.num_reported)
        return num_updates

    def record_update(self, clusters: Sequence[ClusterState], num_counted: int) -> int:
        """Record an update that these clusters made together; return how many updates are new."""
        for progress in map(self._of, clusters):
            progress.version, progress.position = progress.version + 1, self._settings.position(num_counted)
        return len(clusters)

    def record_agreement(self, clusters: Iterable[ClusterState], round_id: RoundId | None = None) -> None:
        """Record that these clusters have the same weights now; the round that made them is their anchor."""
        shared = [self._of(cluster) for cluster in clusters]
        before = {each.anchor_round for each in shared}
        newest = max((each for each in before if each is not None), default=None)
        if round_id is not None and len(before) > 1:
            for each in shared:
                each.is_fed |= each.anchor_round != newest
        seen = max((each.num_samples_seen - each.num_alone for each in shared), default=0)
        seen += sum(each.num_alone for each in shared)
        for each in shared:
            each.num_alone, each.num_samples_seen = 0, seen
            each.agreed_version = each.version
            each.anchor_round = each.anchor_round if round_id is None else round_id

    def send_rates(
        self, cluster: ClusterState, num_updates: int, batches: float, times: float = 1.0
    ) -> list[Send]:
        """Return the rates of the next so many updates, where they are not what the cluster was sent.

        All clusters together train so many batches while this one makes an update. Rates are so many times
        those of the job.
        """
        progress = self._of(cluster)
        latest = max((update for update in progress.rates if update <= progress.version), default=0)
        progress.rates = {update: rate for update, rate in progress.rates.items() if update >= latest}
        told = progress.rates.get(latest)
        sends = []
        for ahead in range(num_updates):
            update = progress.version + ahead
            rate = times * self._settings.rate(progress.position + int(ahead * batches))
            if progress.rates.get(update, told) != rate:
                progress.rates[update] = rate
                sends += [Send(node, LearningRate(cluster.build_id, update, rate)) for node in cluster.nodes]
            told = rate
        return sends

    def _of(self, cluster: ClusterState) -> Progress:
        fresh = Progress(cluster.version, self._position, agreed_version=cluster.version)
        return self._progress.setdefault(cluster.cluster_id, fresh)


_CLEAR_CHANGE = 0.1  # of the rate: less is not worth a notice


class RateNews:
    """Tells that the requester's own Adam has clearly another rate than people know."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._told_times = 1.0  # its rate, in the one that was given

    def tell(self) -> list[Notify]:
        """Return what is to be told, if there is anything."""
        times = self._placement.rate_times
        is_back = times == 1.0 != self._told_times
        if not is_back and abs(times / self._told_times - 1) < _CLEAR_CHANGE:
            return []
        self._told_times = times
        return [Notify(RateChanged(times, len(self._placement.clusters)))]


def divide_batch(batch_size: int, rates: Sequence[float]) -> tuple[int, ...]:
    """Return the share of each cluster in a batch, by speed; each gets a sample at least."""
    total = sum(rates)
    wished = [batch_size * rate / total if total > 0 else batch_size / len(rates) for rate in rates]
    shares = [max(1, int(each)) for each in wished]
    while sum(shares) > batch_size and max(shares) > 1:
        shares[shares.index(max(shares))] -= 1
    by_need = sorted(range(len(rates)), key=lambda k: shares[k] - wished[k])
    for k in range(batch_size - sum(shares)):
        shares[by_need[k % len(rates)]] += 1
    return tuple(shares)


def divide_among(placement: Placement, batch_size: int) -> dict[str, int]:
    """Return how many samples an update of each running cluster has."""
    running = placement.running
    if not placement.sharing.is_split or not running:
        return {each.cluster_id: batch_size for each in running}
    shares = divide_batch(batch_size, [each.samples_per_second for each in running])
    return {each.cluster_id: share for each, share in zip(running, shares, strict=True)}


class BatchShares:
    """Shares of a batch, worked out once for each set of running clusters."""

    def __init__(self) -> None:
        self._running: tuple[ClusterState, ...] = ()
        self._is_split = False
        self._shares: dict[str, int] = {}

    def find(self, cluster: ClusterState, placement: Placement, batch_size: int) -> int:
        """Return how many samples an update of a running cluster has."""
        if self._running is not placement.running or self._is_split is not placement.sharing.is_split:
            self._running, self._is_split = placement.running, placement.sharing.is_split
            self._shares = divide_among(placement, batch_size)
        return self._shares[cluster.cluster_id]


_MOST_BATCHES = 2  # one that is trained, one that waits


@dataclass(frozen=True, slots=True)
class ExactBatch:
    """A batch whose gradients clusters are to sum: the leases of those that train a share of it."""

    rate: float
    leases: dict[str, OpenLease]  # by cluster_id; without those given back
    num_trained: dict[str, int] = field(default_factory=dict)  # samples of leases that are done

    def num_microbatches(self, cluster: ClusterState) -> int:
        """Return how many microbatches the share of a cluster has; none, if it has no share."""
        lease = self.leases.get(cluster.cluster_id)
        return 0 if lease is None else len(lease.num_samples)


class ExactBatches:
    """Batches that are granted and not yet summed, oldest first."""

    def __init__(self) -> None:
        self._batches: deque[ExactBatch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def first(self) -> ExactBatch | None:
        """The batch whose gradients are summed next."""
        return self._batches[0] if self._batches else None

    def may_add(self, placement: Placement) -> bool:
        """Return whether clusters may get another batch before the last ones are summed.

        A cluster without a share in a batch would begin the next one too early. None trains while another
        is being built, which begins with the weights the others have now.
        """
        running = {each.cluster_id for each in placement.running}
        is_building = any(each.phase is ClusterPhase.BUILDING for each in placement.clusters)
        is_shared_by_all = all(batch.leases.keys() == running for batch in self._batches)
        return bool(running) and not is_building and is_shared_by_all and len(self) < _MOST_BATCHES

    def add(self, batch: ExactBatch) -> None:
        """Add a batch that is granted."""
        self._batches.append(batch)

    def release(self, cluster: ClusterState) -> None:
        """Go on without the shares of a cluster that gives its leases back."""
        for batch in self._batches:
            batch.leases.pop(cluster.cluster_id, None)
        self._batches = deque(batch for batch in self._batches if batch.leases)

    def find(self, lease: OpenLease) -> ExactBatch | None:
        """Return the batch that a lease is a share of."""
        return next((each for each in self._batches if each.leases.get(lease.cluster_id) is lease), None)

    def is_waiting(self, cluster: ClusterState) -> bool:
        """Return whether a cluster has done its share of the first batch, and waits for the others."""
        return self.first is not None and cluster.cluster_id in self.first.num_trained

    def has_share(self, cluster: ClusterState) -> bool:
        """Return whether a cluster has a share that is in no weights yet."""
        return any(cluster.cluster_id in each.leases for each in self._batches)

    def pop(self, count: int | None = None) -> list[ExactBatch]:
        """Remove so many of the oldest batches, or all, and return them."""
        taken = [*self._batches][:count]
        self._batches = deque([*self._batches][len(taken) :])
        return taken


_MOST_KEPT = 100  # of what is told at the end
_MOST_INSPECTED = 32  # microbatches: where all of them fail, it is not for their samples


@dataclass(frozen=True, slots=True)
class DroppedSamples:
    """Samples of the train data, or of the validation data, that were dropped together."""

    samples: tuple[int, ...]
    reason: str
    is_evaluation: bool = False


class Drops:
    """Takes every microbatch that is dropped; `found` says what is known of their samples, in order.

    A sample at fault costs one microbatch, not one in each epoch: another takes its place from then on.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[bool, tuple[int, ...]], str] = {}
        self._faulty: set[tuple[bool, int]] = set()
        self._under_way: dict[tuple[bool, tuple[int, ...]], None] = {}
        self._num_inspected = 0
        self._replaced: set[int] = set()  # of the train data

    @property
    def found(self) -> tuple[DroppedSamples, ...]:
        """Samples and reasons, each once: those at fault alone, else all of their microbatch."""
        return tuple(DroppedSamples(key[1], reason, key[0]) for key, reason in self._found.items())

    def record(self, told: MicrobatchDropped) -> list[Action]:
        """Tell of a microbatch; have its samples inspected if none of them is known to be at fault."""
        faulty = tuple(sample for sample in told.samples if (told.is_evaluation, sample) in self._faulty)
        told = replace(told, faulty=faulty)
        key, actions = (told.is_evaluation, told.samples), [Notify(told)]
        if faulty:
            return [*actions]
        if len(told.samples) == 1:
            return [*actions, *self._name(told.is_evaluation, told.samples, told.reason)]
        self._keep(*key, told.reason)
        if key in self._under_way or self._num_inspected == _MOST_INSPECTED:
            return [*actions]
        self._num_inspected += 1
        self._under_way[key] = None
        return [*actions, InspectSamples(*key)]

    def conclude(self, inspected: SamplesInspected) -> list[Action] | str:
        """Name the samples that were found to be at fault."""
        key = (inspected.is_evaluation, inspected.samples)
        if key not in self._under_way:
            return "nobody asked about these samples"
        del self._under_way[key]
        by_reason: dict[str, list[int]] = {}
        for sample, reason in inspected.faulty:
            if sample in inspected.samples:
                by_reason.setdefault(reason, []).append(sample)
        if by_reason:
            self._found.pop(key, None)
        actions: list[Action] = []
        for reason, samples in by_reason.items():
            actions += self._name(inspected.is_evaluation, samples, reason)
            self._replaced |= set() if inspected.is_evaluation else set(samples)
        return actions

    def replace_faulty(self, order: SendFields) -> SendFields:
        """Put other samples of a microbatch in the places of those that the requester's side found at fault.

        An evaluation goes without the microbatch: no sample of it counts twice.
        """
        if order.is_evaluation or self._replaced.isdisjoint(x for batch in order.samples for x in batch):
            return order
        return replace(order, samples=tuple(map(self._replace, order.samples)))

    def _replace(self, samples: tuple[int, ...]) -> tuple[int, ...]:
        good = [sample for sample in samples if sample not in self._replaced] or samples
        return tuple(
            good[index % len(good)] if sample in self._replaced else sample
            for index, sample in enumerate(samples)
        )

    def _name(self, is_evaluation: bool, samples: Sequence[int], reason: str) -> list[Action]:
        new = tuple(sample for sample in samples if (is_evaluation, sample) not in self._faulty)
        self._faulty |= {(is_evaluation, sample) for sample in new}
        if not new:
            return []
        self._keep(is_evaluation, new, reason)
        return [Notify(SamplesDropped(new, reason, is_evaluation))]

    def _keep(self, is_evaluation: bool, samples: tuple[int, ...], reason: str) -> None:
        if len(self._found) < _MOST_KEPT:
            self._found.setdefault((is_evaluation, samples), reason)
