"""The model owner's side: what is trained, on what, how, and what came out of it."""
