"""Move content by hash, for the hub and for peers alike."""
