"""A model as stages: capture it, cut it, send it as data, rebuild it."""
