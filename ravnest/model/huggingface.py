"""What Hugging Face models do differently while they are exported, undone: capture then sees plain training.

Nothing here imports transformers; it only matters when the requester's program has.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator

import torch

from ravnest.model.export_hazards import replaced


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
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and "maybe_autocast" in vars(module):
                # It marks what must stay in full precision, but only where autocast is on already.
                stack.enter_context(replaced(module, "maybe_autocast", torch.autocast))
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
