"""A model as stages: `capture` makes blueprints, `blueprint` cuts, `stage` runs them, `state` has tensors."""
