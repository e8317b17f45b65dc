"""Train without waiting: what a stage does next, how stale it may get, which samples it sees."""
