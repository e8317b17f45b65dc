"""From a user's module to a blueprint, on the requester's PC only: the one place that runs foreign Python."""
