"""All that capture knows of Hugging Face transformers: what those models do that no program can.

While a model is exported, the same numbers are computed in a way that a list of operations can say
(`plain_transformers`). LayerDrop is switched off (`without_layerdrop`), and a note says so. All this matters
only when the requester's program has imported transformers; nothing here imports it.
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from statistics import NormalDist
from typing import Any

import torch
from torch import nn

from ravnest.model.export_hazards import replaced

LAYERDROP_NOTE = "LayerDrop is switched off: every layer is trained on every batch"


@contextlib.contextmanager
def without_layerdrop(model: nn.Module) -> Iterator[bool]:
    """Keep every layer meanwhile; say whether the model would have dropped any."""
    names = ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop")
    dropping = [
        (module, name, share)
        for module in model.modules()
        if type(module).__module__.startswith("transformers.")
        for name in names
        if isinstance(share := getattr(module, name, None), float) and share > 0.0
    ]
    for module, name, _ in dropping:
        setattr(module, name, 0.0)
    try:
        yield bool(dropping)
    finally:
        for module, name, share in dropping:
            setattr(module, name, share)


@contextlib.contextmanager
def plain_transformers(has_mask: bool) -> Iterator[None]:
    """Let such models run for export as they train."""
    with contextlib.ExitStack() as stack:
        masking = sys.modules.get("transformers.masking_utils")
        if masking is not None and not has_mask:
            # Outside of export they say "causal" instead of building a mask, when no sample is padded.
            ignore = getattr(masking, "_ignore_causal_mask_sdpa", None)
            if ignore is not None:
                stack.enter_context(replaced(masking, ignore.__name__, _without_tracing(ignore)))
            if hasattr(masking, "find_packed_sequence_indices"):
                stack.enter_context(replaced(masking, "find_packed_sequence_indices", lambda *_, **__: None))
        experts = sys.modules.get("transformers.integrations.moe")
        if experts is not None:
            chosen = experts.ExpertsInterface
            stack.enter_context(replaced(chosen, "get_interface", lambda *_, **__: _run_all_experts))
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and "maybe_autocast" in vars(module):
                # It marks what must stay in full precision, but only where autocast is on already.
                stack.enter_context(replaced(module, "maybe_autocast", torch.autocast))
        for where, kind, method, plain in _PLAIN_METHODS:
            if where in sys.modules:
                owner = getattr(sys.modules[where], kind)
                stack.enter_context(replaced(owner, method, plain))
        stack.enter_context(replaced(torch, "rand", _keep_layers(torch.rand)))
        yield


def _without_tracing(ignore: Callable[..., bool]) -> Callable[..., bool]:
    """Return their rule for leaving out the mask as it is when nothing is traced: not within a window."""
    signature = inspect.signature(ignore)

    def is_plainly_causal(*arguments: object, **keywords: object) -> bool:
        given = signature.bind(*arguments, **keywords).arguments
        length, window = given["kv_length"], given.get("local_attention_size")
        is_square = given.get("q_length", given.get("query_length")) == length
        return given["padding_mask"] is None and is_square and (window is None or length < window)

    return is_plainly_causal


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


def _run_all_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the chosen experts for each token, by way of all experts for all tokens.

    How many tokens an expert gets depends on the numbers in a batch, so a program cannot say it. What experts
    that were not chosen compute is multiplied by zero.
    """
    number, num_tokens = experts.num_experts, hidden.shape[0]
    # One more for "no expert", which some models choose.
    weights = torch.zeros(num_tokens, number + 1, dtype=shares.dtype, device=shares.device)
    weights = weights.scatter_add(1, chosen, shares)[:, :number]
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    made = _project(experts, name, hidden.expand(number, *hidden.shape))
    made = experts._apply_gate(made) if experts.has_gate else experts.act_fn(made)
    made = _project(experts, "down_proj", made)
    if experts.has_post_expert_norm:
        made = experts.post_expert_norm(made)
    return (made * weights.t().unsqueeze(-1)).sum(dim=0).to(hidden.dtype)


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


_PLAIN_METHODS = (
    (
        "transformers.models.gemma3n.modeling_gemma3n",
        "Gemma3nTextMLP",
        "_gaussian_topk",
        _cut_below_quantile,
    ),
    ("transformers.models.fnet.modeling_fnet", "FNetBasicFourierTransform", "forward", _transform),
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
