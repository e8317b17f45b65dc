"""The largest number of any interval of a line, for many intervals at once."""

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


class RangeMaximum:
    """Knows the largest of 1, 2, 4 ... numbers from each on; two of these cover an interval."""

    def __init__(self, numbers: _Floats) -> None:
        self._largest = [numbers]
        while (step := 2 ** (len(self._largest) - 1)) * 2 <= len(numbers):
            below = self._largest[-1]
            self._largest.append(np.maximum(below[:-step], below[step:]))

    def find(self, start: _Ints, stop: _Ints) -> _Floats:
        """Return the largest number of each interval [start, stop); 0 of an empty one."""
        start, stop = np.broadcast_arrays(start, stop)
        found = np.zeros(start.shape)
        length = stop - start
        for power, table in enumerate(self._largest):
            fits = (length >= 2**power) & (length < 2 ** (power + 1))
            low, high = start[fits], stop[fits] - 2**power
            found[fits] = np.maximum(table[low], table[high])
        return found
