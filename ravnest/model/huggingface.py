"""What Hugging Face models do differently while they are exported, undone: capture then sees plain training.

Nothing here imports transformers; it only matters when the requester's program has.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import torch


@contextlib.contextmanager
def plain_transformers(has_mask: bool) -> Iterator[None]:
    """Let such models run for export as they train."""
    with contextlib.ExitStack() as stack:
        masking = sys.modules.get("transformers.masking_utils")
        if masking is not None and not has_mask:
            # Outside of export they say "causal" instead of building a mask, when no sample is padded.
            stack.enter_context(_replaced(masking, "_ignore_causal_mask_sdpa", lambda *_, **__: True))
            stack.enter_context(_replaced(masking, "find_packed_sequence_indices", lambda *_, **__: None))
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers."):
                # It marks what must stay in full precision, but only where autocast is on already.
                stack.enter_context(_replaced(module, "maybe_autocast", torch.autocast))
        yield


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, function: Callable[..., object]) -> Iterator[None]:
    before = vars(module).get(name)
    if before is None:
        yield
        return
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)
