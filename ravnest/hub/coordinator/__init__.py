"""The hub's decisions: pure, replayable."""
