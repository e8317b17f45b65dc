"""The model owner's side."""
