"""Train without waiting."""
