"""Move content by hash."""
