"""How noisy gradients are: the noise scale of a job, measured on the way and at no cost.

The mean gradient of n samples has the expected square G^2 + V / n: G is the gradient of all data, V the
variance of one sample's. Microbatches and the batch they make up are two such means, so they give both. V and
G^2 add up over the stages of a cluster; V / G^2 is the noise scale, in samples (McCandlish et al., 2018).
"""

from collections.abc import Iterable
from math import isfinite

from ravnest.protocol.training import GradientNoise

_LEAST_UPDATES = 20  # measured, before the mean is told
_MEMORY = 0.97  # of the running mean: about the last 30 measured updates
_ALL_UPDATES = 64  # are measured at first; later
_EVERY = 8  # one of so many is


class NoiseMeter:
    """Running means of V and G^2 of one stage. Feed it every microbatch, then the mean gradient."""

    def __init__(self) -> None:
        self._num_updates = 0
        self._weight = self._variance = self._signal = 0.0
        self.forget()

    def forget(self) -> None:
        """Begin a new update."""
        self._squares = self._inverses = 0.0  # sums over its microbatches
        self._num_microbatches = self._num_samples = 0
        self._is_plain = True

    @property
    def wants_batch(self) -> bool:
        """Whether the update under way is to be measured: its mean gradient is worth a look."""
        is_turn = self._num_updates < _ALL_UPDATES or self._num_updates % _EVERY == 0
        return is_turn and self._is_plain and self._num_microbatches > 1

    def add_microbatch(self, norms: Iterable[float], num_samples: int, weight: float) -> None:
        """Take the norms of a microbatch's gradient; one that weighs less makes the mean no plain one."""
        self._squares += sum(norm * norm for norm in norms)
        self._inverses += 1 / num_samples
        self._num_microbatches += 1
        self._num_samples += num_samples
        self._is_plain &= weight == 1.0

    def end_update(self, norms: Iterable[float] | None) -> None:
        """Take the norms of the mean gradient, if it was wanted."""
        if norms is not None:
            square = sum(norm * norm for norm in norms)
            part, whole = self._inverses / self._num_microbatches, 1 / self._num_samples
            variance = (self._squares / self._num_microbatches - square) / (part - whole)
            signal = square - variance * whole
            if isfinite(variance) and isfinite(signal):
                self._weight = _MEMORY * self._weight + 1
                self._variance = _MEMORY * self._variance + variance
                self._signal = _MEMORY * self._signal + signal
        self._num_updates += 1
        self.forget()

    @property
    def noise(self) -> GradientNoise | None:
        """What was measured; None before there is enough of it."""
        if self._weight < _LEAST * (1 - 1e-9):
            return None
        return GradientNoise(self._variance / self._weight, self._signal / self._weight)


_LEAST = (1 - _MEMORY**_LEAST_UPDATES) / (1 - _MEMORY)
