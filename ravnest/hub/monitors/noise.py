"""Noise: adds up what stages say of their gradients, and tells the job's noise scale.

A cluster's noise scale is known when each of its stages has reported. That of the job is the median over
clusters, and no further from the guess than a factor: what stages say is believed only within reason. It
grows while a job learns; it is told at first and each time it is clearly larger.
"""

from collections.abc import Collection
from statistics import median

from ravnest.ids import NodeId
from ravnest.plan.sharing import TrainingLength
from ravnest.protocol.training import GradientNoise

_CLEARLY = 1.5  # times as large
_MOST_TIMES = 16.0  # as large, or as small, as the guess


class NoiseMonitor:
    """Feed it what stages report; it returns a noise scale that is worth telling."""

    def __init__(self) -> None:
        self._found: dict[str, dict[NodeId, GradientNoise]] = {}  # by cluster
        self._told = 0.0

    def note(
        self,
        cluster_id: str,
        nodes: Collection[NodeId],
        sender: NodeId,
        noise: GradientNoise,
        length: TrainingLength,
    ) -> float | None:
        """Take a stage's report; return the noise scale if it is new or clearly larger."""
        self._found.setdefault(cluster_id, {})[sender] = noise
        if any(node not in self._found[cluster_id] for node in nodes):
            return None
        guess = length.noise_scale
        middle = median(_scale(each.values()) for each in self._found.values())
        scale = min(max(middle, guess / _MOST_TIMES), guess * _MOST_TIMES)
        if scale < _CLEARLY * self._told:
            return None
        self._told = scale
        return scale

    def forget_others(self, cluster_ids: Collection[str]) -> None:
        """Forget clusters that are no more."""
        self._found = {each: found for each, found in self._found.items() if each in cluster_ids}


def _scale(stages: Collection[GradientNoise]) -> float:
    variance = max(0.0, sum(each.variance for each in stages))
    signal = sum(each.signal for each in stages)
    return variance / signal if signal > 0.0 else float("inf")
