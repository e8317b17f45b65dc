"""Messages as data."""
