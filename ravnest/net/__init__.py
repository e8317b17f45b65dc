"""Move messages: each exactly once, in order per service, the urgent first, only between known keys."""
