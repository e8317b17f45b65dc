"""Curves of bounded length: points of (seconds, samples, value), whatever a run's length.

A full curve halves itself: two neighbours become their mean. Readers say how much they have, and get the
rest; after a halving they get the whole curve again.
"""

from dataclasses import dataclass

MOST_POINTS = 1024
Point = tuple[float, int, float]  # seconds of the hub's time, samples trained, value


@dataclass(frozen=True, slots=True)
class CurvePart:
    """The points of a curve from number `first` on; a reader has what came before if generations agree."""

    generation: int
    first: int
    points: tuple[Point, ...]


class RunCurve:
    """Takes points in the order of time."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most_points = most_points
        self._points: list[Point] = []
        self._unfinished: list[Point] = []  # fewer than a point stands for
        self.generation = 0

    def __len__(self) -> int:
        return len(self._points)

    def add(self, seconds: float, num_samples: int, value: float) -> None:
        """Add a point."""
        self._unfinished.append((seconds, num_samples, value))
        if len(self._unfinished) < 2**self.generation:
            return
        self._points.append(_mean(self._unfinished))
        self._unfinished = []
        if len(self._points) >= self._most_points:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [_mean([*pair]) for pair in pairs]
            self.generation += 1

    def after(self, generation: int, number: int) -> CurvePart:
        """Return what a reader lacks that has so many points of this generation."""
        first = number if generation == self.generation and number <= len(self._points) else 0
        return CurvePart(self.generation, first, tuple(self._points[first:]))


def _mean(points: list[Point]) -> Point:
    """Return the mean value, where the last of the points is."""
    seconds, num_samples, _ = points[-1]
    return seconds, num_samples, sum(point[2] for point in points) / len(points)
