"""How clusters share a job, and what that costs in quality.

More clusters train more samples per second, but a sample teaches less when several clusters make their
updates side by side. `efficiency` says how much less, by the noise scale of the gradients; `share_job`
chooses how clusters agree so that samples per second times efficiency is largest. The formula and its limits
are in docs/quality.md.
"""

from dataclasses import dataclass, replace
from math import ceil, sqrt

from ravnest.config import Averaging, PlanConfig
from ravnest.plan.forecast import forecast
from ravnest.plan.types import ModelProfile, Plan, Swarm

LEAST_UPDATES = 5  # of a cluster between two rounds: more often costs time and gains nothing
LONG_JOB = 3_000  # updates: the first quarter of a longer one is noisier, as was measured
_EARLY_NOISE = 0.5  # of a batch: where clusters lose most, in the first part of a job
STATISTICS_SAMPLES = 64  # of a batch norm: with fewer it trains noticeably worse
_ROUND_COST = 0.02  # seconds of messages and votes, however small the model
_GAIN = 1.05  # another way of sharing must be this much better


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the clusters of a plan share a job; a lone cluster shares nothing."""

    averaging: Averaging = Averaging.OVERLAPPED
    is_split: bool = False  # each cluster trains its share of every batch, not batches of its own
    num_clusters: int = 1
    updates_between: int = 0  # rounds, as foreseen
    efficiency: float = 1.0  # the training effect of a sample, in that of one process
    samples_per_second: float = 0.0  # rounds included

    @property
    def goodput(self) -> float:
        """Samples per second, in samples of one process."""
        return self.samples_per_second * self.efficiency


ALONE = Sharing()  # one cluster


@dataclass(frozen=True, slots=True)
class TrainingLength:
    """What the efficiency of a job depends on; `noise` is its noise scale in samples, once measured."""

    batch_size: int
    num_updates: int
    average_every: int | None = None
    is_whole_batch: bool = False  # its loss needs all samples of a batch at once
    noise: float | None = None
    has_statistics: bool = False  # of batches: a batch norm sees only the share of its cluster

    @property
    def noise_scale(self) -> float:
        """How many samples a batch has where noise and gradient are equally large."""
        if self.noise is not None:
            return max(self.noise, 1e-3)
        return float(self.batch_size * (max(self.num_updates, 1) / 300) ** 0.9)

    @property
    def early_noise(self) -> float:
        """The noise scale by which shares are judged: before it is measured, that of the first updates.

        It grows tenfold and more while a job trains, but what shares lose at first stays lost.
        """
        guess = _EARLY_NOISE * self.batch_size * max(1.0, self.num_updates / LONG_JOB) ** 0.9
        return self.noise_scale if self.noise is not None else guess

    def statistics_effect(self, num_clusters: int) -> float:
        """Return the training effect where a batch norm sees one share, in that of the whole batch."""
        enough = min(self.batch_size, STATISTICS_SAMPLES)
        share = self.batch_size / num_clusters
        return min(1.0, sqrt(share / enough)) if self.has_statistics else 1.0


def efficiency(
    job: TrainingLength, num_clusters: int, averaging: Averaging, is_split: bool, updates_between: float
) -> float:
    """Return how much a sample teaches, in what it teaches one process.

    `updates_between` counts a cluster's updates between rounds; those of a round that comes late count more.
    """
    if num_clusters == 1:
        return 1.0
    seen = job.statistics_effect(num_clusters) if is_split else 1.0
    if averaging is Averaging.EXACT:
        return seen
    noise, batch = job.early_noise if is_split else job.noise_scale, float(job.batch_size)
    own = batch / num_clusters if is_split else batch
    apart = noise / (1 + updates_between / 4)
    found = (apart + own) / (apart + num_clusters * own) * (noise + batch) / (noise + own)
    return min(1.0, found) * seen


def adam_rate_times(job: TrainingLength, num_clusters: int) -> float:
    """Return how many times as large Adam's rate is to be where so many clusters share each batch.

    Adam divides by the root of squared gradient and noise, and the noise of a share is that much larger. Only
    a measured noise scale says how much; before, nothing changes.
    """
    if job.noise is None or num_clusters == 1:
        return 1.0
    noise = job.noise_scale / job.batch_size
    return sqrt((1 + num_clusters * noise) / (1 + noise))


def share_job(
    plan: Plan,
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    job: TrainingLength,
    can_sum: bool = False,
) -> Sharing:
    """Return the best way for the clusters of a plan to share a job: first by efficiency, then by goodput.

    `profile` is that of a microbatch as the plan cuts it, so `config.accumulates` may hold. `can_sum` allows
    to sum gradients, where the planner may choose.
    """
    count = len(plan.clusters)
    overlapped = replace(config, averaging=Averaging.OVERLAPPED)
    seen = forecast(plan, profile, swarm, overlapped)
    if count < 2:
        return Sharing(samples_per_second=seen.samples_per_second)
    ways = [_way(each, plan, profile, swarm, config, job) for each in _allowed(config, can_sum)]
    good = [each for each in ways if each.efficiency >= config.favour.least_efficiency]
    best = max(good or ways, key=lambda each: each.goodput)
    # Of ways that are almost as good, the first one costs least in quality.
    return next(each for each in good or ways if each.goodput * _GAIN >= best.goodput)


def _allowed(config: PlanConfig, can_sum: bool) -> list[Averaging]:
    """Return the ways that are open, the ones that cost least in quality first."""
    if config.averaging is not Averaging.AUTO:
        return [config.averaging]
    return [*([Averaging.EXACT] if can_sum else []), Averaging.BLOCKING, Averaging.OVERLAPPED]


def _way(
    averaging: Averaging,
    plan: Plan,
    profile: ModelProfile,
    swarm: Swarm,
    config: PlanConfig,
    job: TrainingLength,
) -> Sharing:
    """Foresee one way of sharing a job."""
    count, is_split = len(plan.clusters), not job.is_whole_batch
    stands_still = averaging is not Averaging.OVERLAPPED
    assumed = replace(config, averaging=Averaging.BLOCKING if stands_still else Averaging.OVERLAPPED)
    if averaging is Averaging.EXACT:
        assumed = replace(assumed, deltas=config.exact_gradients)
    seen = forecast(plan, profile, swarm, assumed)
    round_seconds = seen.round_seconds + _ROUND_COST
    rate = sum(each.samples_per_second for each in seen.clusters)
    if stands_still:
        rate /= 1.0 - config.averaging_share  # what the forecast takes off for pauses: here they are counted
    update_seconds = job.batch_size * (1 if is_split else count) / rate
    updates = float(job.average_every or LEAST_UPDATES)
    if averaging is Averaging.EXACT:
        updates = 1.0
    elif job.average_every is None:
        share = config.averaging_share if stands_still else 1.0
        updates = max(updates, ceil(round_seconds / (share * update_seconds)))
    lateness = min(1.0, round_seconds / (updates * update_seconds))
    apart = updates if stands_still else (1 + 2 * lateness) * updates
    pause = round_seconds if stands_still else 0.0
    return Sharing(
        averaging,
        is_split,
        count,
        int(updates),
        efficiency(job, count, averaging, is_split, apart),
        rate * updates * update_seconds / (updates * update_seconds + pause),
    )


def show_sharing(sharing: Sharing, batch_size: int) -> str:
    """Return what several clusters do with a batch, and what that costs, as a sentence."""
    count = sharing.num_clusters
    shared = f"{count} clusters share each batch of {batch_size}" if sharing.is_split else f"{count} clusters"
    if sharing.averaging is Averaging.EXACT:
        summed = f"{shared} and sum its gradients, as one process would"
        seen = f"; its batch norms see {batch_size // count} samples, not {batch_size}"
        return summed + (seen if sharing.efficiency < 1.0 else "")
    how = "between two of" if sharing.averaging is Averaging.BLOCKING else "beside"
    often = f"average every {sharing.updates_between} updates, {how} them"
    return f"{shared} and {often}; a sample has {100 * sharing.efficiency:.0f} % of its effect in one process"
