"""A job: a model, data, a loss, and how to train.

A job checks the requester's objects early, so that a mistake is found before capture. No code of it leaves
this PC: `capture` makes a blueprint of the model, `settings` turns the optimizer into names and numbers.
"""

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ravnest.config import FrozenFormat, Mean, with_known_settings
from ravnest.config import OptimizerKind as Recipe
from ravnest.engine.optimizers import OptimizerSettings
from ravnest.engine.recipe import base_rate, choose_rate, from_torch, make_settings
from ravnest.engine.train_config import AveragingRule
from ravnest.errors import ConfigError
from ravnest.model.capture.capture import Captured, CaptureWishes, capture_as
from ravnest.model.capture.model_with_loss import Metric
from ravnest.model.stage.profile import find_matrices
from ravnest.requester.dataset import SampleBatch, Samples, loader_batch_size, show_thing
from ravnest.requester.lr_schedules import Schedule, constant, cosine, is_torch_scheduler, read_schedule
from ravnest.requester.padding import PaddingWish
from ravnest.requester.sample_stream import StreamLimits
from ravnest.requester.text_codec import check_tokenizer
from ravnest.requester.users_code import users_code
from ravnest.units import Dimension, parse_quantity, show_value

TorchOptimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_NAME = re.compile(r"(?=\S)[\w.:/+()@,' -]{1,64}(?<=\S)")
_PRECISIONS = ("auto", "fp32", "bf16")
_OPTIMIZERS = f"one of torch.optim, made from model.parameters(), or of {', '.join(Recipe)}"
_SHUFFLE_WINDOW = 8192
_TIMES = 'a time like "5 min", or None for no checkpoints'


@with_known_settings
@dataclass(frozen=True, eq=False)
class Job:
    """A model to train, with its data, its loss and its optimizer.

    Data is a dict (or tuple) of tensors, a dataset with length and index, an iterable of samples, or a
    DataLoader, which brings its own batch size. A sample is a dict of fields or a tuple (inputs..., target).
    `loss` and `metrics` take what the model returned and the batch, or its target when batches are tuples;
    without a loss the model returns it. `inputs` names the fields the model takes. `is_padded=False` promises
    that no sample is padded. Samples of different lengths are padded with what `pad` says of each field, to
    the longest or to `max_length`; of tokens with an attention mask it is known. `num_workers` processes read
    a dataset ahead, as many as the DataLoader has if left out. A long iterable is shuffled within
    `shuffle_window` samples, if `max_steps` says how much of it is needed. `optimizer` is one of
    torch.optim (or several) over the model's parameters, or the name of a recipe with its `learning_rate`;
    left out, that of a short job is higher, unless the model `is_pretrained`. `schedule` is one of ours, a
    function, or one of torch's over that optimizer. `clip` limits the norm of each tensor's gradient,
    `clip_norm` that of the whole model's. With `ema`, like 0.999, a mean of the weights over time is kept
    too. One batch is one update; `max_steps` updates are made, or those of all `epochs`. The
    model is evaluated `evaluate_every` so many updates, or after each epoch, and in the end. A batch travels
    through the stages as `microbatches`. Clusters average their weights `average_every` batches, and by the
    `averaging_rule` more than those. From four clusters on their `mean` is robust: no single one moves it
    further than the others differ; "plain" and "robust" choose for any number. What was trained is kept
    `checkpoint_every` so often, like "5 min"; None: never. Large weights that are not trained are stored as
    `frozen` says (fp32, bf16, int8, int4) or as the plan does. `weights` is a safetensors file, a folder of
    shards or a mirror's list to begin with; a model made under `rv.empty_weights()` without them is filled
    layer by layer, as its modules say. After every evaluation a language model goes on with the
    `sample_prompts`, for people to read; `tokenizer` is one of transformers, or two functions (encode,
    decode), or left out where tokens are bytes.
    """

    model: nn.Module = field(repr=False)
    train_data: Any = field(repr=False)
    val_data: Any = field(default=None, repr=False, kw_only=True)
    batch_size: int = field(default=32, kw_only=True)
    epochs: int = field(default=1, kw_only=True)
    max_steps: int | None = field(default=None, kw_only=True)
    evaluate_every: int | None = field(default=None, kw_only=True)
    loss: Metric | None = field(default=None, repr=False, kw_only=True)
    metrics: Mapping[str, Metric] | None = field(default=None, repr=False, kw_only=True)
    optimizer: TorchOptimizers | str | None = field(default=None, repr=False, kw_only=True)
    learning_rate: float | None = field(default=None, kw_only=True)
    schedule: Schedule | Callable[[int], float] | Any = field(default=None, repr=False, kw_only=True)
    clip: float | None = field(default=None, kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    ema: float | None = field(default=None, kw_only=True)
    average_every: int | str = field(default="auto", kw_only=True)
    averaging_rule: AveragingRule = field(default=AveragingRule(), kw_only=True)
    mean: str = field(default="auto", kw_only=True)
    checkpoint_every: str | None = field(default="1 min", kw_only=True)
    microbatches: int | str = field(default="auto", kw_only=True)
    precision: str = field(default="auto", kw_only=True)
    frozen: str | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    inputs: Sequence[str] | None = field(default=None, kw_only=True)
    is_padded: bool | None = field(default=None, kw_only=True)
    pad: Mapping[str, float] | None = field(default=None, kw_only=True)
    max_length: int | None = field(default=None, kw_only=True)
    num_workers: int | None = field(default=None, kw_only=True)
    shuffle_window: int | None = field(default=None, kw_only=True)
    is_pretrained: bool | None = field(default=None, kw_only=True)
    weights: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    sample_prompts: Sequence[str] = field(default=(), kw_only=True)
    tokenizer: Any = field(default=None, repr=False, kw_only=True)
    name: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _require(isinstance(self.model, nn.Module), "model", self.model, "an instance of torch.nn.Module")
        _check_functions(self.loss, self.metrics)
        self._fill_in("batch_size", loader_batch_size(self.train_data) or self.batch_size)
        self._check_settings()
        self._check_optimizer()
        is_window = self.shuffle_window is None or self.samples.is_iterable
        _require(is_window, "shuffle_window", self.shuffle_window, "none: all of this data is shuffled")
        if self.max_steps is not None:
            self._fill_in("epochs", -(-self.max_steps // self.batches_per_epoch))
        self._fill_in("name", type(self.model).__name__[:64] if self.name is None else self.name)
        is_name = isinstance(self.name, str) and _NAME.fullmatch(self.name)
        _require(is_name, "name", self.name, "1 to 64 letters, digits, inner spaces and . : / + ( ) @ , ' -")
        _ = (
            self.samples,
            self.val_samples,
            self.rates,
            self.checkpoint_seconds,
        )  # what is of no known form is told here

    def first_batch(self) -> SampleBatch:
        """Return the first batch of the train data; it is read once and kept."""
        return self.samples.first_batch()

    def capture(self, tell: Callable[[str], object] = lambda _: None) -> Captured:
        """Turn the model into a blueprint, with the first batch as the example; `tell` hears each step."""
        with users_code("the data"):
            batch = self.first_batch()
            self.samples.check_some()
            if self.val_samples is not None:
                self.val_samples.check_like(self.samples)
                self.val_samples.check_some()
        is_padded = True if self.is_padded is None and self.samples.padding else self.is_padded
        wishes = CaptureWishes(self.name, self.inputs, is_padded, tell=tell)
        captured = capture_as(self.model, batch, self.loss, self.metrics or {}, wishes)
        if not captured.batch_loss.is_cuttable and self.microbatches not in ("auto", 1):
            raise ConfigError(f"microbatches is {self.microbatches}, but {captured.batch_loss.note}")
        return replace(captured, notes=(*_notes(batch, self.batch_size), *captured.notes))

    def settings(self, captured: Captured, planned_updates: int = 0) -> OptimizerSettings:
        """Return how each trained parameter is updated, by its name in the blueprint; tied ones once."""
        trained = {entry.name: entry.shape for entry in captured.blueprint.state if entry.is_trainable}
        if isinstance(self.optimizer, Recipe):
            matrices, rate = find_matrices(captured.blueprint), self.find_rate(planned_updates)
            found = make_settings(self.optimizer, rate, trained, matrices, planned_updates)
        else:
            assert not isinstance(self.optimizer, str | None)
            given = {name: captured.state[name] for name in trained}
            found = from_torch(self.optimizer, given, is_scheduled=is_torch_scheduler(self.schedule))
        found = replace(found, ema=self.ema)
        if self.clip_norm is not None:
            found = replace(found, clip=None, clip_norm=float(self.clip_norm))
        if self.clip is None:
            return found
        return replace(found, clip=None if math.isinf(self.clip) else float(self.clip))

    def find_rate(self, planned_updates: int = 0) -> float:
        """Return the learning rate of a recipe: the one given, or the recipe's own for so many updates."""
        assert isinstance(self.optimizer, Recipe)
        if self.learning_rate is not None:
            return self.learning_rate
        return choose_rate(self.optimizer, planned_updates, has_trained_weights=self.has_trained_weights)

    @property
    def batches_per_epoch(self) -> int:
        """Updates of one pass over the train data, the last one maybe with fewer samples."""
        return -(-len(self.samples) // self.batch_size)

    @property
    def num_updates(self) -> int:
        """Updates of the whole job."""
        return self.epochs * self.batches_per_epoch if self.max_steps is None else self.max_steps

    @property
    def num_total(self) -> int:
        """Samples of the whole job, each as often as it is trained."""
        epochs, more = divmod(self.num_updates, self.batches_per_epoch)
        return epochs * len(self.samples) + more * self.batch_size

    @property
    def has_trained_weights(self) -> bool:
        """Whether the model was trained before: as the job says, by its weights, or by its norms' gains."""
        if self.is_pretrained is not None:
            return self.is_pretrained
        return self.weights is not None or _has_trained_gains(self.model)

    @cached_property
    def samples(self) -> Samples:
        """The train data by number."""
        wish = PaddingWish(self.pad, self.max_length)
        most = None if self.max_steps is None else self.max_steps * self.batch_size
        return Samples(
            self.train_data,
            self.batch_size,
            is_padded=self.is_padded,
            padding=wish,
            limits=StreamLimits(most, window=self.shuffle_window or _SHUFFLE_WINDOW),
            num_readers=self.num_workers,
        )

    @cached_property
    def val_samples(self) -> Samples | None:
        """The validation data by number, if there is any."""
        if self.val_data is None:
            return None
        return Samples(
            self.val_data,
            self.batch_size,
            what="validation data",
            is_padded=self.is_padded,
            like=self.samples,
            num_readers=self.num_workers,
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """End the processes that read the data when what is done here has ended."""
        try:
            yield
        finally:
            for samples in (self.samples, self.val_samples):
                if samples is not None:
                    samples.close_readers()

    @cached_property
    def checkpoint_seconds(self) -> float | None:
        """The time between two checkpoints, if there are any."""
        if self.checkpoint_every is None:
            return None
        _require(isinstance(self.checkpoint_every, str), "checkpoint_every", self.checkpoint_every, _TIMES)
        try:
            seconds = parse_quantity(self.checkpoint_every, Dimension.SECONDS)
        except ConfigError as error:
            raise ConfigError(f"checkpoint_every: {error}") from None
        _require(seconds >= 1, "checkpoint_every", self.checkpoint_every, "a second or more")
        return seconds

    @cached_property
    def rates(self) -> Schedule:
        """The schedule; left out, it is what a recipe was tuned with, or the constant rate of torch.optim."""
        if self.schedule is not None:
            return read_schedule(self.schedule, self.batches_per_epoch)
        return cosine(warmup=0.05) if isinstance(self.optimizer, Recipe) else constant()

    def _fill_in(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_settings(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("epochs", self.epochs)):
            _require(_is_whole(value, 1), name, value, "a whole number, 1 or more")
        is_steps = self.max_steps is None or _is_whole(self.max_steps, 1)
        _require(is_steps, "max_steps", self.max_steps, "a whole number of updates, 1 or more")
        is_often = self.evaluate_every is None or _is_whole(self.evaluate_every, 1)
        _require(is_often, "evaluate_every", self.evaluate_every, "a whole number of updates, 1 or more")
        is_every = self.average_every == "auto" or _is_whole(self.average_every, 1)
        _require(is_every, "average_every", self.average_every, '"auto" or batches, a whole number above 0')
        is_rule = isinstance(self.averaging_rule, AveragingRule)
        _require(is_rule, "averaging_rule", self.averaging_rule, "an rv.AveragingRule(...)")
        _require(self.mean in list(Mean), "mean", self.mean, f"one of {', '.join(Mean)}")
        is_many = self.microbatches == "auto" or _is_whole(self.microbatches, 1)
        _require(is_many, "microbatches", self.microbatches, '"auto" or a whole number above 0')
        is_clip = self.clip is None or _is_positive(self.clip)
        _require(is_clip, "clip", self.clip, "a number above 0, or math.inf for no clipping")
        is_norm = self.clip_norm is None or (_is_positive(self.clip_norm) and self.clip is None)
        _require(is_norm, "clip_norm", self.clip_norm, "a number above 0, and no clip beside it")
        is_share = self.ema is None or (_is_positive(self.ema) and self.ema < 1)
        _require(is_share, "ema", self.ema, "a number between 0 and 1, like 0.999")
        _require(self.precision in _PRECISIONS, "precision", self.precision, "auto, fp32 or bf16")
        is_format = self.frozen is None or self.frozen in list(FrozenFormat)
        _require(is_format, "frozen", self.frozen, f"{', '.join(FrozenFormat)} or nothing")
        _require(_is_whole(self.seed, 0), "seed", self.seed, "a whole number from 0 to 2**63 - 1")
        _require(self.is_padded in (None, True, False), "is_padded", self.is_padded, "True, False or nothing")
        is_flag = self.is_pretrained in (None, True, False)
        _require(is_flag, "is_pretrained", self.is_pretrained, "True, False or nothing")
        is_place = self.weights is None or isinstance(self.weights, str | os.PathLike)
        is_place = is_place and (self.weights is None or os.path.exists(self.weights))
        _require(
            is_place, "weights", self.weights, "a safetensors file, a folder or a mirror's list that exists"
        )
        self._check_data_settings()

    def _check_data_settings(self) -> None:
        is_pad = self.pad is None or (
            isinstance(self.pad, Mapping) and all(map(_is_number, self.pad.values()))
        )
        _require(is_pad, "pad", self.pad, "a dict from a field to the number that pads it")
        is_length = self.max_length is None or _is_whole(self.max_length, 1)
        _require(is_length, "max_length", self.max_length, "a whole number, 1 or more")
        is_prompts = isinstance(self.sample_prompts, tuple | list) and all(
            isinstance(each, str) and each for each in self.sample_prompts
        )
        _require(is_prompts, "sample_prompts", self.sample_prompts, 'a list of texts: ["Once upon a time"]')
        check_tokenizer(self.tokenizer)
        is_count = self.num_workers is None or _is_whole(self.num_workers, 0)
        _require(is_count, "num_workers", self.num_workers, "a whole number of processes, 0 or more")
        is_window = self.shuffle_window is None or _is_whole(self.shuffle_window, 2)
        is_window = is_window and (self.shuffle_window is None or self.max_steps is not None)
        _require(
            is_window, "shuffle_window", self.shuffle_window, "a number of samples, 2 or more, and max_steps"
        )
        is_list = not isinstance(self.inputs, str)
        _require(is_list, "inputs", self.inputs, f"a list of fields: [{self.inputs!r}]")

    def _check_optimizer(self) -> None:
        if isinstance(self.optimizer, str | None):
            name = Recipe.MUON if self.optimizer is None else self.optimizer
            _require(name in list(Recipe), "optimizer", name, _OPTIMIZERS)
            self._fill_in("optimizer", Recipe(name))
            rate = self.learning_rate
            if rate is not None:
                _require(_is_positive(rate) and rate < math.inf, "learning_rate", rate, "a number above 0")
                self._fill_in("learning_rate", float(rate))
            return
        given = [self.optimizer] if isinstance(self.optimizer, torch.optim.Optimizer) else self.optimizer
        found = given if isinstance(given, tuple | list) else []
        is_known = bool(found) and all(isinstance(one, torch.optim.Optimizer) for one in found)
        _require(is_known, "optimizer", self.optimizer, _OPTIMIZERS)
        is_scheduled = is_torch_scheduler(self.schedule)
        rate = base_rate(given[0].param_groups[0], is_scheduled)
        is_own = self.learning_rate is None
        _require(is_own, "learning_rate", self.learning_rate, f"none: the optimizer brings its own, {rate:g}")
        _require(0 < rate < math.inf, "lr of the optimizer's first group", rate, "a number above 0")
        modules = [one for one in (self.model, self.loss) if isinstance(one, nn.Module)]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        known = {str(number): parameter for number, parameter in enumerate(parameters)}
        from_torch(given, known, is_scheduled=is_scheduled)


def _require(is_good: object, name: str, value: object, wanted: str) -> None:
    if not is_good:
        raise ConfigError(f"{name} is {show_thing(value)}; give {wanted}")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= sys.maxsize


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _has_trained_gains(model: nn.Module) -> bool:
    """Return whether the gains of a norm differ: new ones are all alike, and training pulls them apart."""
    for module in model.modules():
        gains = getattr(module, "weight", None)
        if "norm" not in type(module).__name__.lower() or not isinstance(gains, torch.Tensor):
            continue
        if not gains.is_meta and gains.numel() and bool((gains != gains.flatten()[0]).any()):
            return True
    return False


def _check_functions(loss: object, metrics: Mapping[str, Metric] | None) -> None:
    _require(loss is None or callable(loss), "loss", loss, "a function of (what the model returns, batch)")
    _require(isinstance(metrics, Mapping | None), "metrics", metrics, "a dict of names and functions")
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or not callable(metric):
            raise ConfigError(
                f"metrics has {show_value(name)}: {show_value(metric)}; give names and functions"
            )


def _notes(batch: SampleBatch, batch_size: int) -> tuple[str, ...]:
    num_samples = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
    if num_samples >= batch_size:
        return ()
    count = "1 sample" if num_samples == 1 else f"{num_samples} samples"
    return (f"the train data has {count}, fewer than batch_size {batch_size}; to train, set a smaller one",)
