"""Agree on weights: ring all-reduce and the rounds that commit it, without any I/O."""
