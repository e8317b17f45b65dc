"""One hypothesis profile for all laws: the same examples on every machine, and no clock."""

from hypothesis import settings

settings.register_profile("ravnest", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("ravnest")
