"""A model as stages."""
