"""Questions about the whole system, each answered in one sentence by what it measured."""
