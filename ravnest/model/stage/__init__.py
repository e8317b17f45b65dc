"""A blueprint that runs: checked without memory, measured, built and called with its weights as arguments."""
