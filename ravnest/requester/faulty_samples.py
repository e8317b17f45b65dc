"""Faulty samples: which samples of a dropped microbatch are at fault, found on the requester's own PC.

A number that is not finite is seen at once. Otherwise the whole model runs as in evaluation on each sample
alone, if it is small enough, and says what a stage said: that a label is out of range, for instance.
"""

import math
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from ravnest.model.capture.capture import Captured
from ravnest.model.capture.sample_length import count_work
from ravnest.model.stage.stage_program import StageProgram, build_stage_program

_MOST_WORK = 1e12  # parameters times tokens, over all samples: a minute on a slow PC


class SampleInspector:
    """Inspects samples of a captured model, one microbatch after the other."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._program: StageProgram | None = None
        self._lock = threading.Lock()

    def inspect(self, fields: Mapping[str, Tensor]) -> dict[int, str]:
        """Return the rows of these fields that fail, each with the reason; none if that is not known."""
        with self._lock:
            num_samples = len(next(iter(fields.values())))
            state = self._captured.state.values()
            is_known = not any(tensor.is_meta for tensor in state)
            work = num_samples * count_work(sum(tensor.numel() for tensor in state), fields)
            found = {}
            for row in range(num_samples):
                alone = {name: field[row : row + 1] for name, field in fields.items()}
                reason = _find_bad_number(alone)
                if reason is None and is_known and work <= _MOST_WORK:
                    reason = self._run(alone)
                if reason is not None:
                    found[row] = reason
            return found

    def _run(self, fields: Mapping[str, Tensor]) -> str | None:
        captured = self._captured
        device = next((tensor.device for tensor in captured.state.values()), torch.device("cpu"))
        if self._program is None:
            self._program = build_stage_program(captured.blueprint, device)
        given = {name: field.to(device) for name, field in fields.items()}
        # Copies of what a forward writes: the model is the requester's.
        state = {
            entry.name: tensor.clone() if entry.is_written else tensor
            for entry in captured.blueprint.state
            for tensor in [captured.state[entry.name]]
        }
        try:
            with torch.no_grad(), torch.random.fork_rng():
                results = self._program.forward(state, {}, given, training=False).results
            loss = float(results["loss"])
        except (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError) as error:
            told = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            return f"{type(error).__name__}: {told:.200}"
        return None if math.isfinite(loss) else f"its loss is {loss}"


def _find_bad_number(fields: Mapping[str, Tensor]) -> str | None:
    """Return which field has a number that is no number."""
    for name, field in fields.items():
        if field.is_floating_point() and bool(field.isnan().any()):
            return f"{name!r} has a number that is NaN"
    return None
