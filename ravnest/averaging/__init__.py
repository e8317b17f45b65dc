"""Agree on weights."""
