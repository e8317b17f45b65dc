"""How many cases a test tries: few that find what breaks in CI, many of them in `make fuzz`."""

import os

IS_THOROUGH = bool(os.environ.get("RAVNEST_FUZZ"))


def pick(few: int, many: int) -> int:
    """Return the number of cases to try."""
    return many if IS_THOROUGH else few
