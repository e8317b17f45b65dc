"""The meeting place."""
