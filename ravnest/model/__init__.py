"""A model as data and as stages: captured, cut, checked, run and measured."""
