"""Who does what."""
