"""Watch and conclude: pure, soft state."""
