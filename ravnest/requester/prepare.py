"""Turns a job into what the hub and the owner need.

Capturing takes seconds and runs the requester's code.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from ravnest.config import (
    EXACT_FORMATS,
    RESERVE,
    Averaging,
    FrozenFormat,
    Mean,
    PlanConfig,
    StateFormat,
    WeightFormat,
    WireChoice,
    WireFormat,
)
from ravnest.config import OptimizerKind as Recipe
from ravnest.engine.optimizers import Adagrad, Adam, Muon, NAdam, OptimizerSettings, RmsProp, Sgd
from ravnest.engine.train_config import Precision, TrainConfig
from ravnest.errors import ConfigError
from ravnest.hub.coordinator.events import JobGiven, JobSettings
from ravnest.model.blueprint.frozen_storage import choose_storage
from ravnest.model.capture.capture import Captured
from ravnest.model.stage.profile import has_channels, measure
from ravnest.plan.sharing import STATISTICS_SAMPLES
from ravnest.plan.types import ModelProfile
from ravnest.requester.checkpoint_store import (
    Checkpoint,
    Fingerprint,
    count_epochs,
    find_difference,
    hash_state,
)
from ravnest.requester.first_weights import find_first_weights
from ravnest.requester.job import Job
from ravnest.requester.lr_schedules import factors
from ravnest.requester.owner import DeliverResult, JobOwner, Keeper

logger = logging.getLogger(__name__)

_SNAPSHOT_TIMES = 4  # as large as its state: optimizers keep two numbers for each


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that can be trained."""

    captured: Captured
    owner: JobOwner
    job: JobGiven


def prepare(
    job: Job,
    plan: PlanConfig,
    num_nodes: int,
    settle_seconds: float,
    keeper: Keeper | None = None,
    start: Checkpoint | None = None,
    deliver: DeliverResult | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> PreparedJob:
    """Capture and measure the model, to be trained from the beginning or from a checkpoint.

    `tell` hears what is done next.
    """
    mean = plan.mean if job.mean == Mean.AUTO else Mean(job.mean)
    plan = replace(plan, states=_choose_states(job, plan), mean=mean)
    _check_settings(job, plan)
    plan = plan if job.frozen is None else replace(plan, frozen=FrozenFormat(job.frozen))
    captured = job.capture(tell)
    captured = _store_frozen(captured, plan.frozen)
    for note in captured.notes:
        logger.warning("note: %s", note)
    num_batches = job.num_updates
    optimizer = replace(job.settings(captured, num_batches), versions=plan.versions, states=plan.states)
    logger.info("learning rate %.2g, %d updates planned", optimizer.learning_rate, num_batches)
    # Peers lend memory for tensors; that of their programs is beside it (docs/lending.md).
    config = replace(plan, optimizer=_recipe(job, optimizer), overhead_bytes=0.0)
    precision = WeightFormat.BF16 if job.precision == "bf16" else WeightFormat.FP32
    config = replace(config, predict_weights=optimizer.has_prediction, precision=precision)
    config = replace(config, keeps_ema=job.ema is not None)
    config = _fit_formats(config, captured, job.batch_size)
    settings = _settings(job, captured, optimizer, num_batches)
    settings = replace(settings, expected_nodes=num_nodes, settle_seconds=settle_seconds, mean=plan.mean)
    training = TrainConfig(
        optimizer,
        job.batch_size,
        precision=cast(Precision, job.precision),
        planned_updates=num_batches,
        max_lag=config.max_lag,
        deltas=config.deltas,
        averaging=job.averaging_rule,
        exact_gradients=config.exact_gradients,
    )
    folder = None if keeper is None else keeper.folder
    first = find_first_weights(job, captured, folder, is_needed=start is None)
    left_out = first.find_lasting(captured.blueprint.state)
    state, frozen = hash_state(captured.blueprint.state), first.sample(left_out)
    sizes = (len(job.samples), job.batch_size, job.epochs, job.seed)
    fingerprint = Fingerprint(job.name or "", state, *sizes, frozen, job.samples.window)
    owner = JobOwner(job, captured, training, fingerprint, keeper, deliver, first, left_out)
    books = None
    if start is not None:
        _check_start(start, fingerprint, settings.num_total)
        books = owner.go_on_from(start)
    tell("it is measured")
    profile = measure(captured.blueprint, job.batch_size, is_cast=precision is WeightFormat.BF16)
    settings = _size_reserve(settings, profile)
    return PreparedJob(captured, owner, JobGiven(profile, config, settings, now=0.0, books=books))


def _size_reserve(settings: JobSettings, profile: ModelProfile) -> JobSettings:
    """Let clusters have samples ahead; where PCs have memory for fewer, the hub grants fewer."""
    sample_bytes = (profile.crossing_bytes[0] + profile.crossing_bytes[-1]) / profile.samples_per_batch
    most = int(RESERVE.most_bytes // max(sample_bytes, 1.0))
    return replace(settings, reserve_seconds=RESERVE.seconds, reserve_samples=most)


def _check_settings(job: Job, plan: PlanConfig) -> None:
    """Refuse settings that do not go together, before the model is captured."""
    num_samples = len(job.samples)
    if num_samples < job.batch_size:
        problem = f"the train data has {num_samples} samples, fewer than batch_size {job.batch_size}"
        raise ConfigError(f"{problem}; give more data or a smaller batch_size")
    if plan.deltas is WireFormat.FP16:
        raise ConfigError(
            "deltas is fp16, too narrow for sums over clusters; choose fp32, bf16, int8 or int4"
        )
    if plan.exact_gradients not in EXACT_FORMATS:
        problem = f"exact_gradients is {plan.exact_gradients}, too coarse for gradients"
        raise ConfigError(f"{problem}; choose {' or '.join(EXACT_FORMATS)}")
    if plan.averaging is Averaging.EXACT and plan.mean is Mean.ROBUST:
        problem = "the mean is to be robust, and exact updates believe every gradient"
        raise ConfigError(f'{problem}; choose another averaging, or mean="auto" among PCs of your own')
    if plan.states is StateFormat.INT8 and job.averaging_rule.momentum:
        raise ConfigError("momenta are averaged, which int8 states cannot be; choose states=bf16 or fp32")


def _store_frozen(captured: Captured, chosen: FrozenFormat) -> Captured:
    """Return the model with its frozen matrices stored as they are to be; say so if it has none."""
    has_any = any(entry.is_frozen and len(entry.shape) > 1 for entry in captured.blueprint.state)
    if chosen is not FrozenFormat.FP32 and not has_any:
        told = "note: frozen=%s changes nothing: no matrix of the model is frozen; see requires_grad_(False)"
        logger.warning(told, chosen)
    return replace(captured, blueprint=choose_storage(captured.blueprint, chosen))


def _choose_states(job: Job, plan: PlanConfig) -> StateFormat:
    """Return how moments are kept: exactly where the requester may compare them with one process."""
    if plan.states is not StateFormat.AUTO:
        return plan.states
    if job.optimizer is Recipe.ADAMW_8BIT:
        return StateFormat.INT8
    is_own = not isinstance(job.optimizer, Recipe)
    return StateFormat.FP32 if is_own or plan.averaging is Averaging.EXACT else StateFormat.BF16


def _fit_formats(config: PlanConfig, captured: Captured, batch_size: int) -> PlanConfig:
    """Plan activations without channels as what they will travel as."""
    has_format = WireFormat.INT4_CHANNELS in config.activation_formats
    if not has_format or has_channels(captured.blueprint, batch_size):
        return config
    logger.warning("note: the channels of what crosses stages are not known, so activations travel as int8")
    return replace(config, activations=WireChoice.INT8)


def _check_start(start: Checkpoint, now: Fingerprint, num_total: int) -> None:
    """Refuse a checkpoint that this job cannot go on from; say what another number of epochs means."""
    before, num_begun = start.books.job, count_epochs(start.books.leases)
    difference = find_difference(before, now)
    if difference is None and now.epochs < num_begun:
        difference = f"epoch {num_begun} is begun in the checkpoint, and the job has {now.epochs} epochs"
        difference = f"{difference}; set epochs={num_begun} or more, or begin a new run in another folder"
    if difference is None and num_total < start.books.num_counted:
        difference = f"{start.books.num_counted} samples are trained in the checkpoint, and the job has"
        difference = f"{difference} {num_total}; set a higher max_steps, or begin a new run in another folder"
    if difference is not None:
        raise ConfigError(difference)
    if now.epochs != before.epochs:
        told = "note: it goes on with %d epochs, no longer %d; from here the learning rate is of %d epochs"
        logger.warning(told, now.epochs, before.epochs, now.epochs)


def _settings(job: Job, captured: Captured, optimizer: OptimizerSettings, num_batches: int) -> JobSettings:
    # What counts is no statistic of a batch.
    has_statistics = any(x.is_written and "float" in x.dtype for x in captured.blueprint.state)
    is_whole = not captured.batch_loss.is_cuttable
    is_adam = all(isinstance(group.rule, Adam | NAdam) for group in optimizer.groups)  # not Muon beside it
    rate = optimizer.learning_rate
    return JobSettings(
        num_samples=len(job.samples),
        num_validation=0 if job.val_samples is None else len(job.val_samples),
        batch_size=job.batch_size,
        epochs=job.epochs,
        max_batches=job.max_steps or 0,
        shuffle_window=job.samples.window,
        evaluate_updates=job.evaluate_every or 0,
        rates=tuple(rate * factor for factor in factors(job.rates, num_batches)),
        seed=job.seed,
        least_samples=STATISTICS_SAMPLES if has_statistics else 1,
        has_statistics=has_statistics,
        microbatches=1 if is_whole else job.microbatches if isinstance(job.microbatches, int) else 0,
        is_whole_batch=is_whole,
        has_own_adam=not isinstance(job.optimizer, Recipe) and is_adam,
        has_tied_weights=any(len(entry.positions) > 1 for entry in captured.blueprint.state),
        average_every=job.average_every if isinstance(job.average_every, int) else None,
        checkpoint_every=job.checkpoint_seconds,
        keeps_last=job.checkpoint_seconds is not None,
        metrics=tuple(name for name, _ in captured.blueprint.train.results if name != "loss"),
        most_snapshot_bytes=sum(_SNAPSHOT_TIMES * x.size_bytes + 4096 for x in captured.blueprint.state),
    )


def _recipe(job: Job, settings: OptimizerSettings) -> Recipe:
    """Return what the planner takes the optimizer for: the hungriest of those that are used."""
    if isinstance(job.optimizer, Recipe):
        return job.optimizer
    rules = [group.rule for group in settings.groups]
    if any(isinstance(rule, RmsProp) and (rule.momentum or rule.is_centered) for rule in rules):
        return Recipe.ADAM  # as much is kept
    if any(isinstance(rule, Adam) for rule in rules):
        return Recipe.NADAM if any(isinstance(rule, NAdam) for rule in rules) else Recipe.ADAM
    if any(isinstance(rule, Muon) for rule in rules):
        return Recipe.MUON
    if any(isinstance(rule, RmsProp | Adagrad) for rule in rules):
        return Recipe.RMSPROP
    has_momentum = any(isinstance(rule, Sgd) and rule.momentum for rule in rules)
    return Recipe.MOMENTUM if has_momentum else Recipe.SGD
