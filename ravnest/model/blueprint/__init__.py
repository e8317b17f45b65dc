"""A model as data, without torch: its operations by name, as JSON, where it is cut, what shares memory."""
