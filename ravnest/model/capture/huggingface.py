"""All that capture knows of Hugging Face transformers: what those models do that no program can.

While a model is exported, the same numbers are computed in a way that a list of operations can say
(`plain_transformers`). LayerDrop is switched off (`switched_off`), and a note says so. All this matters
only when the requester's program has imported transformers; nothing here imports it.
"""

import contextlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from ravnest.model.capture.export_hazards import replaced


@dataclass(frozen=True, slots=True)
class Switch:
    """A number of a module or of its configuration that is set to another while the model is captured."""

    names: tuple[str, ...]
    off: float | None
    note: str


LAYERDROP = Switch(
    ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop"),
    0.0,
    "LayerDrop is switched off: every layer is trained on every batch",
)
_SWITCHES = (
    LAYERDROP,
    Switch(("moe_token_dropout",), 0.0, "dropout of tokens behind experts is switched off"),
    Switch(
        ("altup_coef_clip",),
        None,
        "the limit of the altup coefficients is switched off: it changes weights outside the optimizer",
    ),
)


# They draw with Python whether a layer is dropped.
_PYTHON_LAYERDROP = ("musicgen.modeling_musicgen", "musicgen_melody.modeling_musicgen_melody")
_NEVER_DROPPING = SimpleNamespace(uniform=lambda low, high: high)


@contextlib.contextmanager
def switched_off(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Switch off what no program can do, with what to tell of it; afterwards all is as it was."""
    held: list[tuple[Any, str, float]] = []
    notes: dict[str, None] = {}
    for module in model.modules():
        if not type(module).__module__.startswith("transformers."):
            continue
        for owner, switch in itertools.product((module, vars(module).get("config")), _SWITCHES):
            for name in switch.names:
                number = vars(owner).get(name) if owner is not None else None
                if isinstance(number, float) and number > 0.0:
                    held.append((owner, name, number))
                    vars(owner)[name] = switch.off  # a configuration checks what is set
                    notes[switch.note] = None
    try:
        with contextlib.ExitStack() as stack:
            for where in _PYTHON_LAYERDROP:
                drawing = sys.modules.get(f"transformers.models.{where}")
                if drawing is not None:
                    stack.enter_context(replaced(drawing, "random", _NEVER_DROPPING))
            yield tuple(notes)
    finally:
        for owner, name, number in held:
            vars(owner)[name] = number


@contextlib.contextmanager
def plain_transformers(fields: Collection[str]) -> Iterator[Collection[str]]:
    """Let such models run for export as they train; what there is to tell of it is known afterwards."""
    notes: dict[str, None] = {}
    with contextlib.ExitStack() as stack:
        masking = sys.modules.get("transformers.masking_utils")
        if masking is not None:
            has_mask = "attention_mask" in fields or "position_ids" in fields
            stack.enter_context(_plain_masks(masking, has_mask))
        experts = sys.modules.get("transformers.integrations.moe")
        if experts is not None:
            run = partial(_run_all_experts, notes)
            stack.enter_context(replaced(experts.ExpertsInterface, "get_interface", lambda *_, **__: run))
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and "maybe_autocast" in vars(module):
                # It marks what must stay in full precision, but only where autocast is on already.
                stack.enter_context(replaced(module, "maybe_autocast", torch.autocast))
        for where, kind, name, plain in _PLAIN_CODE:
            owner = sys.modules.get(f"transformers.models.{where}")
            if owner is not None:
                stack.enter_context(replaced(getattr(owner, kind) if kind else owner, name, plain))
        stack.enter_context(replaced(torch, "rand", _keep_layers(torch.rand)))
        if "global_attention_mask" not in fields:
            stack.enter_context(_local_attention())
        yield notes.keys()


@contextlib.contextmanager
def _plain_masks(masking: ModuleType, has_mask: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        ignore = getattr(masking, "_ignore_causal_mask_sdpa", None)
        if ignore is not None and not has_mask:
            # Outside of export they say "causal" instead of building a mask, when no sample is padded.
            stack.enter_context(replaced(masking, ignore.__name__, _without_tracing(ignore)))
        if hasattr(masking, "find_packed_sequence_indices"):
            number_rows = _number_packed_rows if has_mask else lambda *_, **__: None
            stack.enter_context(replaced(masking, "find_packed_sequence_indices", number_rows))
        if hasattr(masking, "_vmap_expansion_sdpa"):
            stack.enter_context(replaced(masking, "_vmap_expansion_sdpa", _mask_all_at_once))
        yield


def _number_packed_rows(position_ids: torch.Tensor) -> torch.Tensor:
    """Return which of the texts in a packed row each token is of: one begins where positions do not go on.

    It is their rule, in operators that providers run.
    """
    steps = position_ids[:, 1:] - position_ids[:, :-1]
    return torch.cat([torch.zeros_like(position_ids[:, :1]), (steps != 1).long()], dim=-1).cumsum(-1)


def _without_tracing(ignore: Callable[..., bool]) -> Callable[..., bool]:
    """Return their rule for leaving out the mask as it is when nothing is traced: not within a window."""
    signature = inspect.signature(ignore)

    def is_plainly_causal(*arguments: object, **keywords: object) -> bool:
        given = signature.bind(*arguments, **keywords).arguments
        length, window = given["kv_length"], given.get("local_attention_size")
        is_square = given.get("q_length", given.get("query_length")) == length
        return given["padding_mask"] is None and is_square and (window is None or length < window)

    return is_plainly_causal


def _mask_all_at_once(rule: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a rule for one place of a mask as one for all places: by shapes, where they have torch.vmap."""

    def mask(*indices: torch.Tensor) -> torch.Tensor:
        places = [
            each.reshape([-1 if dim == number else 1 for dim in range(len(indices))])
            for number, each in enumerate(indices)
        ]
        return rule(*places).expand(*(each.shape[0] for each in indices))

    return mask


def _keep_layers(rand: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.rand, but for the number that decides by an `if` whether a layer is dropped.

    It is drawn, for what is drawn later depends on it, and no layer is dropped.
    """

    def draw(*sizes: Any, **options: Any) -> Any:
        drawn = rand(*sizes, **options)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_one = sizes in (([],), ((),), ())
        return 1.0 if is_one and not options and caller.startswith("transformers.") else drawn

    return draw


@contextlib.contextmanager
def _local_attention() -> Iterator[None]:
    """Let Longformer and LED not ask whether a token of the batch sees all others: none does unless told.

    They divide lengths as tensors, too, and read them out again.
    """
    read, divide = torch.Tensor.item, torch.div

    def is_theirs() -> bool:
        caller = str(sys._getframe(2).f_globals.get("__name__", ""))
        return caller.endswith((".modeling_longformer", ".modeling_led"))

    def item(tensor: torch.Tensor) -> Any:
        return False if is_theirs() and tensor.dtype is torch.bool else read(tensor)

    def div(one: Any, other: Any, **options: Any) -> Any:
        is_length = isinstance(one, int) and isinstance(other, int) and is_theirs()
        return one // other if is_length else divide(one, other, **options)

    torch.Tensor.item = item  # type: ignore[assignment, method-assign]
    try:
        with replaced(torch, "div", div):
            yield
    finally:
        del torch.Tensor.item


def _run_all_experts(
    notes: dict[str, None], experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the chosen experts for each token, by way of all experts for all tokens.

    How many tokens an expert gets depends on the numbers in a batch, so a program cannot say it. What experts
    that were not chosen compute is multiplied by zero.
    """
    number = experts.num_experts
    times = number / chosen.shape[-1]
    notes[f"all {number} experts compute every token, {times:.3g} times the work of the chosen ones"] = None
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    made = _project(experts, name, hidden.expand(number, *hidden.shape))
    made = experts._apply_gate(made) if experts.has_gate else experts.act_fn(made)
    made = _project(experts, "down_proj", made)
    if experts.has_post_expert_norm:
        made = experts.post_expert_norm(made)
    return _sum_of_chosen(made, chosen, shares).to(hidden.dtype)


def _sum_of_chosen(made: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum of what its experts made, weighed; `made` has all experts in front."""
    number, num_tokens = made.shape[:2]
    # One more for "no expert", which some models choose.
    weights = torch.zeros(num_tokens, number + 1, dtype=shares.dtype, device=shares.device)
    weights = weights.scatter_add(1, chosen, shares)[:, :number]
    return (made * weights.t().unsqueeze(-1)).sum(dim=0)


def _project(experts: Any, name: str, given: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)
    made = torch.bmm(given, weight if experts.is_transposed else weight.transpose(1, 2))
    return made + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else made


def _transform(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
    """Return the real part of the Fourier transform over rows and features, as matrix products."""
    cosines, sines = zip(*(_waves(size, hidden) for size in hidden.shape[1:]), strict=True)
    real = torch.matmul(torch.matmul(cosines[0], hidden), cosines[1])
    return (real - torch.matmul(torch.matmul(sines[0], hidden), sines[1]),)


def _waves(size: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.arange(size, device=like.device)
    angles = torch.outer(steps, steps).remainder(size).to(like.dtype) * (2.0 * math.pi / size)
    return torch.cos(angles), torch.sin(angles)


def _cut_below_quantile(module: Any, given: torch.Tensor) -> torch.Tensor:
    """Return what of the inputs is above a quantile, as if they were normally distributed."""
    deviations = NormalDist().inv_cdf(module.activation_sparsity)
    spread = torch.std(given, dim=-1, keepdim=True, unbiased=False)
    return torch.relu(given - (torch.mean(given, dim=-1, keepdim=True) + spread * deviations))


def _adapt_languages(module: Any, languages: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Run the adapter of every language for all samples, and keep for each that of its own."""
    before = hidden
    if module.adapter_layer_norm is not None:
        hidden = module.adapter_layer_norm(hidden)
    elif module.adapter_reuse_layer_norm:
        hidden = module.LayerNorm(hidden)
    adapted = torch.zeros_like(hidden)
    for number, adapter in enumerate(module.adapter_modules.values()):
        is_its_own = (languages == number).reshape(*languages.shape, *[1] * (hidden.ndim - languages.ndim))
        adapted = torch.where(is_its_own, adapter(hidden), adapted)
    kept: torch.Tensor = module.dropout(adapted)
    return kept + (hidden if module.ln_before_adapter else before)


def _shift_right(ids: torch.Tensor, pad_token_id: int) -> torch.Tensor:
    """Return the rows shifted by one, the last token of each first, without a change of the batch."""
    ids = torch.where(ids == -100, pad_token_id, ids)
    last = (ids.ne(pad_token_id).sum(dim=1) - 1).unsqueeze(-1)
    return torch.cat([ids.gather(1, last), ids[:, :-1]], dim=1)


def _run_dbrx_experts(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Run all experts for all tokens, from weights that lie in one matrix."""
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    first, second, last = (getattr(module.mlp, name).view(shape) for name in ("w1", "v1", "w2"))
    given = hidden.reshape(1, -1, module.hidden_size).expand(module.num_experts, -1, -1)
    gate = module.mlp.activation_fn(torch.bmm(given, first.transpose(1, 2)))
    made = torch.bmm(gate * torch.bmm(given, second.transpose(1, 2)), last)
    return _sum_of_chosen(made, chosen, shares).view(hidden.shape[0], -1, module.hidden_size)


def _run_nllb_experts(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Run all experts for all tokens, each a module of its own."""
    made = torch.stack([expert(hidden) for name, expert in module.items() if name.startswith("expert_")])
    weights = torch.nn.functional.one_hot(chosen, module.num_experts).to(shares.dtype) * shares.unsqueeze(-1)
    return (made * weights.sum(dim=1).t().unsqueeze(-1)).sum(dim=0).to(hidden.dtype)


def _route_jetmoe(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sort tokens by their experts; how many each gets stays in a tensor."""
    logits = module.layer(hidden).float()
    highest, chosen = logits.topk(module.top_k, dim=1)
    gates = torch.softmax(highest, dim=1).type_as(hidden)
    sizes = torch.nn.functional.one_hot(chosen.flatten(), module.num_experts).sum(dim=0)
    order = chosen.flatten().sort(0)[1]
    return order, order // module.top_k, gates.flatten()[order], sizes, logits


def _run_jetmoe_experts(module: Any, given: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Run all experts for all rows, and keep of each row that of its expert: rows are sorted by experts."""
    rows = torch.arange(given.shape[0], device=given.device)
    own = (rows.unsqueeze(1) >= sizes.cumsum(0)).sum(dim=1)
    made = torch.bmm(given.expand(module.num_experts, *given.shape), module.weight.transpose(1, 2))
    is_own = own == torch.arange(module.num_experts, device=given.device).unsqueeze(1)
    return (made * is_own.unsqueeze(-1)).sum(dim=0)


def _mask_without_landmarks(config: Any, **given: Any) -> Any:
    """Return the mask, or none where attention is by landmarks: it fits none, so theirs takes no padding."""
    if config.num_landmarks != config.segment_means_seq_len:
        return None
    return sys.modules["transformers.masking_utils"].create_bidirectional_mask(config=config, **given)


@dataclass(frozen=True, slots=True)
class _OfOwnSegment:
    """A value for each token, of all tokens in its segment."""

    values: torch.Tensor


def _least_of_segment(values: torch.Tensor, index: Any, **_: object) -> tuple[_OfOwnSegment, Any]:
    """Return for each token the least value in its segment; there are far more segments than tokens."""
    same = index.indices.unsqueeze(-1) == index.indices.unsqueeze(-2)
    largest = torch.full((), torch.iinfo(values.dtype).max, dtype=values.dtype, device=values.device)
    return _OfOwnSegment(torch.where(same, values.unsqueeze(-2), largest).amin(-1)), index


def _look_up_segment(values: torch.Tensor | _OfOwnSegment, index: Any, **_: object) -> torch.Tensor:
    """Return for each token the value of its segment."""
    if isinstance(values, _OfOwnSegment):
        return values.values
    dim, indices = index.batch_dims, index.indices.long()
    beside = values.shape[dim + 1 :]
    places = indices.flatten(dim).reshape(*indices.shape[:dim], -1, *[1] * len(beside))
    found = torch.gather(values, dim, places.expand(*places.shape[: dim + 1], *beside))
    return found.reshape(*indices.shape, *beside)


# The module under transformers.models, the class or "", the name, and what runs instead.
_PLAIN_CODE: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
    ("dbrx.modeling_dbrx", "DbrxExperts", "forward", _run_dbrx_experts),
    ("fnet.modeling_fnet", "FNetBasicFourierTransform", "forward", _transform),
    # Without padding they leave out the mask, and look at the numbers of the batch for it.
    ("fsmt.modeling_fsmt", "", "make_padding_mask", lambda ids, padding_idx=1: ids.eq(padding_idx)),
    ("fsmt.modeling_fsmt", "", "shift_tokens_right", _shift_right),
    ("gemma3n.modeling_gemma3n", "Gemma3nTextMLP", "_gaussian_topk", _cut_below_quantile),
    ("jetmoe.modeling_jetmoe", "JetMoeTopKGating", "forward", _route_jetmoe),
    ("jetmoe.modeling_jetmoe", "JetMoeParallelExperts", "forward", _run_jetmoe_experts),
    ("nllb_moe.modeling_nllb_moe", "NllbMoeExperts", "forward", _run_nllb_experts),
    # For export they do not make the mask that they need.
    ("longt5.modeling_longt5", "", "is_torchdynamo_compiling", lambda: False),
    ("switch_transformers.modeling_switch_transformers", "", "is_torchdynamo_compiling", lambda: False),
    ("nystromformer.modeling_nystromformer", "", "create_bidirectional_mask", _mask_without_landmarks),
    # Of 65,536 segments a table's tokens are in a few; the least of each would need another operator.
    ("tapas.modeling_tapas", "", "reduce_min", _least_of_segment),
    ("tapas.modeling_tapas", "", "gather", _look_up_segment),
    ("xmod.modeling_xmod", "XmodOutput", "lang_adapter", _adapt_languages),
)


# A backward that is written in Python, as operations: y + (x - x.detach()) * slope has the value y, and the
# gradient that the slope says. The comparison with the module says whether it is the same.
def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def _bounded_sqrt(x: torch.Tensor) -> torch.Tensor:
    most = 1000.0  # the slope, near zero
    slope = torch.rsqrt(torch.clamp(4.0 * x, min=1.0 / most**2))
    return torch.sqrt(x.detach()) + (x - x.detach()) * slope.detach()


def _multiply_gate(
    scores: torch.Tensor,
    multiplier: torch.Tensor,
    chosen: torch.Tensor,
    gates: torch.Tensor,
    is_one: torch.Tensor,
) -> torch.Tensor:
    slope = torch.scatter_add(-gates, -1, chosen, torch.ones_like(multiplier)) * multiplier
    along = ((scores - scores.detach()) * slope.detach()).sum(dim=-1, keepdim=True)
    return (multiplier * is_one).detach() + along


def _accumulate_by_angle(
    query_mask: torch.Tensor,
    key_mask: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    config: Any,
) -> torch.Tensor:
    length = config["hash_code_len"]
    product = torch.matmul(query, key.transpose(-1, -2))
    # acos(x) of an angle, without the operator.
    angle = torch.atan2(torch.sqrt(torch.clamp(1.0 - product * product, min=0.0)), product)
    expected = (1 - angle / math.pi) ** length * query_mask[:, :, None] * key_mask[:, None, :]
    expected = expected.detach()
    along = expected * (length / 2) * (product - product.detach())
    return torch.matmul(expected + along, value)


PLAIN_FUNCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "transformers.models.bloom.modeling_bloom.GeLUFunction": _gelu,
    "transformers.models.phimoe.modeling_phimoe.PhimoeMultiplier": _multiply_gate,
    "transformers.models.recurrent_gemma.modeling_recurrent_gemma.SqrtBoundDerivative": _bounded_sqrt,
    "transformers.models.yoso.modeling_yoso.YosoCumulation": _accumulate_by_angle,
}
