"""The tensors of a model by name: as bytes, as files, and where they come from, one at a time."""
