"""Move messages."""
