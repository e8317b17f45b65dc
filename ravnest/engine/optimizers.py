"""Optimizers: the rules as data, one per group of parameters, and the updates they make.

An update is refused as a whole when a gradient is not finite. Lag lowers the learning rate and predicts
weights.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ravnest.config import StateFormat, WeightFormat
from ravnest.engine.moments import SQUARES, Moments
from ravnest.engine.norms import cast_together, find_norms
from ravnest.engine.orthogonal import orthogonalise, orthogonalise_one
from ravnest.errors import WeightsError
from ravnest.protocol.messages import Refusal
from ravnest.protocol.tensors import EMA_SLOT, slot_shape


@dataclass(frozen=True, slots=True)
class Sgd:
    """Plain descent, with momentum and Nesterov's look-ahead if asked."""

    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam; with decoupled weight decay it is AdamW."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@dataclass(frozen=True, slots=True)
class FusedAdam(Adam):
    """Adam by torch's fused kernel: less than half the time on a CPU, but the last bits are other ones."""


@dataclass(frozen=True, slots=True)
class NAdam(Adam):
    """Adam with Nesterov's look-ahead, which gives the fresh gradient more weight."""

    momentum_decay: float = 4e-3


@dataclass(frozen=True, slots=True)
class Muon:
    """Momentum made orthogonal by Newton-Schulz, for matrices and for filters flattened to matrices.

    `matches_adam` gives updates the size of Adam's, so that both share one learning rate. `precision`
    "auto" is float32 on a CPU, where bfloat16 may be fifty times slower, and bfloat16 elsewhere.
    """

    momentum: float = 0.95
    nesterov: bool = True
    epsilon: float = 1e-7
    matches_adam: bool = False
    precision: Literal["auto", "bfloat16", "float32"] = "bfloat16"


@dataclass(frozen=True, slots=True)
class RmsProp:
    """Gradients over the root of the mean of their squares, maybe centered, maybe with momentum."""

    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    is_centered: bool = False


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Gradients over the root of the sum of all their squares."""

    epsilon: float = 1e-10
    rate_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Adafactor:
    """Adam's second moment as a product of two thin ones, no first moment, steps as long as the weights."""

    beta2_decay: float = -0.8
    epsilon: float | None = None  # None: the smallest step of the numbers' type
    least_scale: float = 1e-3
    most_rms: float = 1.0


@dataclass(frozen=True, slots=True)
class Lion:
    """The sign of a short mean of gradients; a longer mean is remembered."""

    beta1: float = 0.9
    beta2: float = 0.99


OptimizerRule = Sgd | Adam | Muon | RmsProp | Adagrad | Adafactor | Lion


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that one rule updates; `rate` is their part of the learning rate that the hub gives."""

    names: tuple[str, ...]
    rule: OptimizerRule
    weight_decay: float = 0.0
    is_decoupled: bool = False  # decay shrinks the weights, instead of being added to the gradient
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """How a model is trained, by name: each stage uses what concerns its parameters. In no group: frozen."""

    groups: tuple[Group, ...]
    learning_rate: float
    clip: float | None = None  # largest norm of one tensor's gradient
    has_prediction: bool = False  # forward sees the weights expected when its gradient will be applied
    lag_updates: int = 0  # so long lag lowers the learning rate, less and less
    versions: WeightFormat = WeightFormat.FP32  # of the weights that forwards see where gradients are late
    states: StateFormat = StateFormat.FP32  # of the moments
    clip_norm: float | None = None  # largest norm of the gradient of the whole model
    ema: float | None = None  # so much of the mean of weights over time is kept in each update


_CHUNK_ITEMS = 1 << 18  # measured: larger ones take up to 1.8 times as long on a CPU
_DEVICE_CHUNK_ITEMS = 1 << 25  # elsewhere: an update needs some copies of a chunk
_LARGEST = 1e4  # of norms, within what half precision holds
_ROUNDING = 1e-3  # of norms and their sums: none of them is off by more


@dataclass(slots=True)
class _Work:
    """Tensors that one rule changes in one go, and how far."""

    names: list[str]
    parameters: list[Tensor]
    gradients: list[Tensor]
    rate: float
    shrink: float = 1.0  # of the weights, where the rule looks at them first
    where: slice | None = None  # of a large tensor that is changed piece by piece, as a row of numbers
    nadam_rates: tuple[Sequence[float], Sequence[float]] = ((), ())
    decay: float = 0.0  # of the weights, that a fused kernel does along with the rest
    skip: Tensor | None = None  # 1 on the device: the kernel changes nothing


class Optimizer:
    """Updates the parameters of one stage; predictions of the `narrow` ones are bf16."""

    def __init__(
        self,
        settings: OptimizerSettings,
        parameters: Mapping[str, Tensor],
        chunk_items: int = _CHUNK_ITEMS,
        narrow: Collection[str] = (),
    ) -> None:
        self.settings = settings
        self._narrow, self._chunk_items = frozenset(narrow), chunk_items
        self._chunks = [
            (group, chunk)
            for group in settings.groups
            for chunk in _chunks(group.names, parameters, chunk_items)
        ]
        self._groups = [(group, parameters[chunk[0]].device.type) for group, chunk in self._chunks]
        self._shapes = {name: tuple(parameters[name].shape) for _, chunk in self._chunks for name in chunk}
        self._moments = Moments(settings.states)
        self._products: dict[str, Tensor] = {}  # of NAdam, by name
        self._steps = dict.fromkeys(self._shapes, 0)
        self._predicted: dict[str, Tensor] = {}
        self._ema: dict[str, Tensor] = {}  # means of weights over time, by name
        self.norm_square = 0.0  # of the last gradient, where the whole model's norm is limited
        self.names = frozenset(self._shapes)  # the other parameters stay as they are

    @torch.no_grad()
    def step(
        self,
        parameters: Mapping[str, Tensor],
        gradients: dict[str, Tensor],
        learning_rate: float,
        lag: float = 0.0,
        *,
        held: Collection[str] = (),
        bounds: Mapping[str, float] | None = None,
        other_square: float = 0.0,
        skip: Tensor | None = None,
    ) -> dict[str, Tensor] | Refusal:
        """Return all parameters after one update, or why it was refused and nothing changed.

        Gradients are taken out of their dict and freed one after the other. Parameters that are `held` are
        not changed in place. `lag` is the mean over the microbatches in the update. `bounds` are known ones
        of the gradients' norms. `other_square` is the square of the norm of the gradients of other stages.
        With `skip`, a number on the device, nobody has looked at the gradients: 1 there leaves all as it was,
        but for the count of updates (`take_back`). Only where `can_skip`.
        """
        own = {name: gradients[name] for name in gradients if name in self.names}
        clipped: dict[str, Tensor] | Refusal
        if skip is not None:
            clipped = own
        elif self.settings.clip_norm is None:
            clipped = self._clip(own, bounds or {})
        else:
            clipped = self._clip_together(own, self.settings.clip_norm, other_square)
        if isinstance(clipped, Refusal):
            return clipped
        gradients.clear()
        learning_rate *= self._lag_factor(lag)
        changed = dict(parameters)
        for group, chunk in self._chunks:
            names = [name for name in chunk if name in clipped]
            if not names:
                continue
            after = [parameters[name].clone() if name in held else parameters[name] for name in names]
            changed.update(zip(names, after, strict=True))
            rate, given = learning_rate * group.rate, [clipped.pop(name) for name in names]
            for name in names:
                self._steps[name] += 1
            work = _Work(names, after, given, rate, skip=skip)
            if isinstance(group.rule, NAdam):
                work.nadam_rates = self._nadam_rates(group.rule, work)
            del given
            for part in _cut(group.rule, work, self._chunk_items):
                self._change(group, part, lag)
            if self.settings.ema is not None:
                self._follow(names, after, self.settings.ema)
        return changed

    @property
    def can_skip(self) -> bool:
        """Whether an update can be launched before anybody has looked at its gradients."""
        settings = self.settings
        is_plain = settings.clip is None and settings.clip_norm is None and settings.ema is None
        return is_plain and all(
            _is_fused(group.rule, device) and (group.is_decoupled or not group.weight_decay)
            for group, device in self._groups
        )

    def take_back(self, names: Iterable[str]) -> None:
        """Count the last update of these parameters no more: the device has skipped it."""
        for name in names:
            self._steps[name] -= 1

    def _follow(self, names: list[str], weights: list[Tensor], kept: float) -> None:
        """Let the means of weights over time follow them; they begin with the first weights."""
        self._ema.update(
            (name, x.float().clone()) for name, x in zip(names, weights, strict=True) if name not in self._ema
        )
        means = [self._ema[name] for name in names]
        torch._foreach_lerp_(means, cast_together(weights, torch.float32), 1 - kept)

    def _change(self, group: Group, work: _Work, lag: float) -> None:
        """Apply one update to some tensors, or to a piece of one."""
        work.gradients = cast_together(work.gradients, work.parameters[0].dtype)
        _decay(group, work)
        is_predicted = self.settings.has_prediction and lag > 0
        start = [tensor.clone() for tensor in work.parameters] if is_predicted else []
        self._apply(group.rule, work)
        if start:
            self._predict(group.rule, work, start, lag)

    def _predict(self, rule: OptimizerRule, work: _Work, start: list[Tensor], lag: float) -> None:
        """Repeat the last move as momentum will, weaker each time. Weight decay is not predicted."""
        moves = list(torch._foreach_sub(work.parameters, start))
        torch._foreach_mul_(moves, _horizon(rule, lag))
        torch._foreach_add_(moves, work.parameters)
        for name, predicted in zip(work.names, moves, strict=True):
            dtype = torch.bfloat16 if name in self._narrow else predicted.dtype
            if work.where is None:
                self._predicted[name] = predicted.to(dtype)
                continue
            if name not in self._predicted:
                self._predicted[name] = torch.empty(self._shapes[name], dtype=dtype)
            self._predicted[name].view(-1)[work.where] = predicted

    def take_predicted(self) -> dict[str, Tensor]:
        """Return the weights expected after the lag of the last step, where they differ; once per step."""
        predicted, self._predicted = self._predicted, {}
        return predicted

    def moments(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the live first moments of the parameters whose rule has them."""
        found: dict[str, Tensor] = {}
        for group, chunk in self._chunks:
            if not _momentum(group.rule):
                continue
            slot = "exp_avg" if isinstance(group.rule, Adam | Lion) else "momentum_buffer"
            live = self._moments.live(slot, chunk, [parameters[name] for name in chunk])
            found.update(zip(chunk, live, strict=True))
        return found

    def state(self) -> Mapping[str, Tensor]:
        """Return the live state by "SLOT/NAME", with the slots of torch.optim; a step changes it."""
        steps = {f"step/{name}": torch.tensor(float(step)) for name, step in self._steps.items() if step}
        products = {f"mu_product/{name}": product for name, product in self._products.items()}
        means = {f"{EMA_SLOT}/{name}": mean for name, mean in self._ema.items()}
        return self._moments.export({**products, **means, **steps})

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a copy of the state of these parameters, from whatever stage."""
        moments, products, means, steps = {}, {}, {}, dict.fromkeys(self._shapes, 0)
        for key, tensor in state.items():
            slot, _, name = key.partition("/")
            shape = self._shapes.get(name)
            if shape is None or tuple(tensor.shape) != slot_shape(slot, shape):
                shape = tuple(tensor.shape)
                raise WeightsError(f"optimizer state {key!r} of shape {shape} does not fit this stage")
            if slot == "step":
                steps[name] = int(tensor)
            elif slot == "mu_product":
                products[name] = tensor.detach().clone()
            elif slot == EMA_SLOT:
                means[name] = tensor.detach().float().clone()
            else:
                moments[key] = tensor.detach()
        self._moments.load(moments)
        self._products, self._ema, self._steps = products, means, steps

    def _clip(self, gradients: dict[str, Tensor], bounds: Mapping[str, float]) -> dict[str, Tensor] | Refusal:
        limit = self.settings.clip or math.inf
        safe = min(limit, _LARGEST) * (1 - _ROUNDING)
        names = [name for name in gradients if not bounds.get(name, math.inf) < safe]
        for name, norm in zip(names, find_norms([gradients[name] for name in names]), strict=True):
            if not math.isfinite(norm):
                return Refusal(f"the gradient of {name!r} is not finite: its norm is {norm}")
            if norm > limit:  # not in place: autograd may give one tensor to two weights
                gradients[name] = gradients[name] * (limit / norm)
        return gradients

    def _clip_together(
        self, gradients: dict[str, Tensor], limit: float, other: float
    ) -> dict[str, Tensor] | Refusal:
        """Shorten all gradients alike, if the whole model's is too long."""
        norms = find_norms(list(gradients.values()))
        for name, norm in zip(gradients, norms, strict=True):
            if not math.isfinite(norm):
                return Refusal(f"the gradient of {name!r} is not finite: its norm is {norm}")
        self.norm_square = sum(norm * norm for norm in norms)
        length = math.sqrt(self.norm_square + other)
        if not length > limit:
            return gradients
        return {name: gradient * (limit / length) for name, gradient in gradients.items()}

    def _lag_factor(self, lag: float) -> float:
        """Return what lag leaves of the learning rate: at first one over lag, later all of it."""
        share = max(self._steps.values(), default=0) / max(self.settings.lag_updates, 1)
        return float(lag ** (share - 1)) if lag > 1 and self.settings.lag_updates and share < 1 else 1.0

    def _apply(self, rule: OptimizerRule, work: _Work) -> None:
        match rule:
            case Sgd():
                self._apply_sgd(rule, work)
            case Muon():
                self._apply_muon(rule, work)
            case RmsProp():
                self._apply_rmsprop(rule, work)
            case Adagrad():
                self._apply_adagrad(rule, work)
            case Adafactor():
                self._apply_adafactor(rule, work)
            case Lion():
                self._apply_lion(rule, work)
            case Adam():
                self._apply_adam(rule, work)
        self._moments.close(self._steps)

    def _apply_sgd(self, rule: Sgd, work: _Work) -> None:
        gradients = work.gradients
        if rule.momentum:
            momenta = self._slots("momentum_buffer", work)
            torch._foreach_mul_(momenta, rule.momentum)
            torch._foreach_add_(momenta, gradients)
            gradients = momenta
            if rule.nesterov:
                gradients = list(torch._foreach_add(work.gradients, momenta, alpha=rule.momentum))
        torch._foreach_add_(work.parameters, gradients, alpha=-work.rate)

    def _apply_adam(self, rule: Adam, work: _Work) -> None:
        means, squares = self._slots("exp_avg", work), self._slots(SQUARES, work)
        steps = [self._steps[name] for name in work.names]
        if _is_fused(rule, means[0].device.type):
            _apply_fused(rule, work, means, squares, steps)
            return
        torch._foreach_lerp_(means, work.gradients, 1 - rule.beta1)
        torch._foreach_mul_(squares, rule.beta2)
        torch._foreach_addcmul_(squares, work.gradients, work.gradients, 1 - rule.beta2)
        corrections = [1 - rule.beta2**step for step in steps]
        # Roots and divisions in the order of torch.optim, for the same rounding.
        if isinstance(rule, NAdam):
            roots = torch._foreach_div(squares, corrections)
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, rule.epsilon)
            fresh, rates = work.nadam_rates
            torch._foreach_addcdiv_(work.parameters, work.gradients, roots, fresh)
        else:
            roots = torch._foreach_sqrt(squares)
            torch._foreach_div_(roots, [correction**0.5 for correction in corrections])
            torch._foreach_add_(roots, rule.epsilon)
            rates = [-work.rate / (1 - rule.beta1**step) for step in steps]
        torch._foreach_addcdiv_(work.parameters, means, roots, rates)

    def _nadam_rates(self, rule: NAdam, work: _Work) -> tuple[list[float], list[float]]:
        """Return how far to go along each gradient and along each mean."""
        fresh, rates = [], []
        for name in work.names:
            step = self._steps[name]
            now = rule.beta1 * (1.0 - 0.5 * (0.96 ** (step * rule.momentum_decay)))
            then = rule.beta1 * (1.0 - 0.5 * (0.96 ** ((step + 1) * rule.momentum_decay)))
            product = self._products.setdefault(name, torch.ones(()))
            product *= now
            fresh.append(-work.rate * (1.0 - now) / (1.0 - product.item()))
            rates.append(-work.rate * then / (1.0 - product.item() * then))
        return fresh, rates

    def _apply_muon(self, rule: Muon, work: _Work) -> None:
        updates = self._slots("momentum_buffer", work)
        torch._foreach_lerp_(updates, work.gradients, 1 - rule.momentum)
        if rule.nesterov:
            updates = list(torch._foreach_lerp(work.gradients, updates, rule.momentum))
        self._moments.close(self._steps)  # products need room: what is wide goes first
        work.gradients = []
        matrices = [update.flatten(1) for update in reversed(updates)]
        del updates
        is_batched = matrices[0].device.type != "cpu"  # on a CPU a product has work enough for itself
        if is_batched:
            found: Iterable[Tensor] = orthogonalise(rule.precision, rule.epsilon, matrices[::-1])
        else:
            found = (orthogonalise_one(rule.precision, rule.epsilon, matrices.pop()) for _ in work.names)
        for parameter, matrix in zip(work.parameters, found, strict=True):
            rows, columns = matrix.shape
            size = 0.2 * math.sqrt(max(rows, columns)) if rule.matches_adam else max(1, rows / columns) ** 0.5
            parameter.add_(matrix.view_as(parameter), alpha=-work.rate * size)

    def _apply_rmsprop(self, rule: RmsProp, work: _Work) -> None:
        squares = self._slots("square_avg", work)
        torch._foreach_mul_(squares, rule.alpha)
        torch._foreach_addcmul_(squares, work.gradients, work.gradients, 1 - rule.alpha)
        if rule.is_centered:
            means = self._slots("grad_avg", work)
            torch._foreach_lerp_(means, work.gradients, 1 - rule.alpha)
            roots = torch._foreach_addcmul(squares, means, means, -1)
            torch._foreach_sqrt_(roots)
        else:
            roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, rule.epsilon)
        if not rule.momentum:
            torch._foreach_addcdiv_(work.parameters, work.gradients, roots, -work.rate)
            return
        momenta = self._slots("momentum_buffer", work)
        torch._foreach_mul_(momenta, rule.momentum)
        torch._foreach_addcdiv_(momenta, work.gradients, roots)
        torch._foreach_add_(work.parameters, momenta, alpha=-work.rate)

    def _apply_adagrad(self, rule: Adagrad, work: _Work) -> None:
        sums = self._slots("sum", work)
        torch._foreach_addcmul_(sums, work.gradients, work.gradients, 1)
        roots = torch._foreach_sqrt(sums)
        torch._foreach_add_(roots, rule.epsilon)
        rates = [-work.rate / (1 + (self._steps[name] - 1) * rule.rate_decay) for name in work.names]
        moves = torch._foreach_mul(work.gradients, rates)
        torch._foreach_addcdiv_(work.parameters, moves, roots)

    def _apply_adafactor(self, rule: Adafactor, work: _Work) -> None:
        for name, parameter, gradient in zip(work.names, work.parameters, work.gradients, strict=True):
            step = self._steps[name]
            share, size = float(step**rule.beta2_decay), math.sqrt(parameter.numel())
            scale = max(rule.least_scale, float(parameter.norm(2)) / size) * min(
                work.rate, 1 / math.sqrt(step)
            )
            parameter.mul_(work.shrink)
            least = torch.finfo(parameter.dtype).eps if rule.epsilon is None else rule.epsilon
            square = self._factored_square(name, gradient, share, least)
            move = square.clamp_(min=least * least).rsqrt_().mul_(gradient)
            shorter = max(1.0, float(move.norm(2)) / (size * rule.most_rms))
            parameter.add_(move, alpha=-scale / shorter)

    def _factored_square(self, name: str, gradient: Tensor, share: float, least: float) -> Tensor:
        """Return the mean square of a gradient, from the means of rows and columns if it has both."""
        if gradient.ndim < 2:
            (variance,) = self._moments.open("variance", [name], [gradient])
            return variance.lerp_(gradient.square(), share).clone()
        means = []
        for slot, dim in (("row_var", -1), ("col_var", -2)):
            (mean,) = self._moments.open(slot, [name], [gradient.narrow(dim, 0, 1)])
            fresh = torch.norm(gradient, dim=dim, keepdim=True).square_().div_(gradient.size(dim))
            means.append(mean.lerp_(fresh, share))
        rows, columns = means
        return (rows @ columns).div_(rows.mean(dim=-2, keepdim=True).clamp_(min=least))

    def _apply_lion(self, rule: Lion, work: _Work) -> None:
        means = self._slots("exp_avg", work)
        moves = torch._foreach_lerp(means, work.gradients, 1 - rule.beta1)
        torch._foreach_sign_(moves)
        torch._foreach_add_(work.parameters, moves, alpha=-work.rate)
        torch._foreach_lerp_(means, work.gradients, 1 - rule.beta2)

    def _slots(self, slot: str, work: _Work) -> list[Tensor]:
        if work.where is None:
            return self._moments.open(slot, work.names, work.parameters)
        (name,), (piece,) = work.names, work.parameters
        return [self._moments.open_piece(slot, name, piece, self._shapes[name], work.where)]


def _chunks(names: Iterable[str], parameters: Mapping[str, Tensor], chunk_items: int) -> list[list[str]]:
    """Return the names a stage has, in lists of one dtype and of limited size."""
    chunks: list[list[str]] = []
    num_items, kind = 0, None
    for name in names:
        if name not in parameters:
            continue
        tensor = parameters[name]
        num_items += tensor.numel()
        is_full = num_items > (chunk_items if tensor.device.type == "cpu" else _DEVICE_CHUNK_ITEMS)
        if is_full or kind != tensor.dtype or not chunks:
            chunks.append([])
            num_items, kind = tensor.numel(), tensor.dtype
        chunks[-1].append(name)
    return chunks


def _cut(rule: OptimizerRule, work: _Work, num_items: int) -> Iterator[_Work]:
    """Yield the work; of a large tensor on a CPU piece by piece, for an update takes some copies of it.

    A piece has `num_items`, a multiple of what a block of moments has. Rules that look at a whole matrix
    get it whole.
    """
    one = work.parameters[0]
    can_cut = len(work.names) == 1 and one.device.type == "cpu" and one.is_contiguous()
    if not can_cut or isinstance(rule, Muon | Adafactor) or one.numel() < 2 * num_items:
        yield work
        return
    row, gradient = one.view(-1), work.gradients.pop().reshape(-1)
    starts = range(0, len(row) - num_items + 1, num_items)  # what is left goes with the last one
    for start in starts:
        where = slice(start, len(row) if start == starts[-1] else start + num_items)
        piece = _Work(work.names, [row[where]], [gradient[where]], work.rate, where=where, skip=work.skip)
        piece.nadam_rates = work.nadam_rates
        yield piece


def _decay(group: Group, work: _Work) -> None:
    """Shrink the weights, or add them to the gradients instead."""
    shrink = 1 - work.rate * group.weight_decay
    if group.weight_decay and not group.is_decoupled:
        work.gradients = list(torch._foreach_add(work.gradients, work.parameters, alpha=group.weight_decay))
        shrink = 1.0
    if isinstance(group.rule, Adafactor):
        work.shrink = shrink
    elif shrink != 1.0 and _is_fused(group.rule, "cuda") and (work.skip is not None or _is_on_gpu(work)):
        work.decay = group.weight_decay
    elif shrink != 1.0:
        torch._foreach_mul_(work.parameters, shrink)


def _apply_fused(
    rule: Adam, work: _Work, means: list[Tensor], squares: list[Tensor], steps: list[int]
) -> None:
    numbers = {step: torch.full((), float(step), device=means[0].device) for step in set(steps)}
    counts = [numbers[step] for step in steps]
    # The kernel goes through memory as it lies: gradients must lie like their parameters.
    pairs = zip(work.gradients, work.parameters, strict=True)
    gradients = [one if one.stride() == to.stride() else to.clone().copy_(one) for one, to in pairs]
    options: dict[str, Any] = {"beta1": rule.beta1, "beta2": rule.beta2, "eps": rule.epsilon, "lr": work.rate}
    options |= {"weight_decay": work.decay, "amsgrad": False, "maximize": False, "found_inf": work.skip}
    torch._fused_adamw_(work.parameters, gradients, means, squares, [], counts, **options)


def _is_fused(rule: OptimizerRule, device_type: str) -> bool:
    return isinstance(rule, FusedAdam) or (type(rule) is Adam and device_type == "cuda")


def _is_on_gpu(work: _Work) -> bool:
    return work.parameters[0].device.type == "cuda"


def _horizon(rule: OptimizerRule, lag: float) -> float:
    """Return how often the last move will be repeated: the sum of momentum^1 ... momentum^lag."""
    momentum = _momentum(rule)
    return momentum * (1.0 - float(momentum**lag)) / (1.0 - momentum)


def _momentum(rule: OptimizerRule) -> float:
    """Return how much of its mean of gradients a rule keeps; 0: it has none."""
    match rule:
        case Adam() | Lion():
            return rule.beta1
        case Adagrad() | Adafactor():
            return 0.0
        case _:
            return rule.momentum
