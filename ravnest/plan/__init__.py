"""The planner: which node hosts which stage, and with whom it averages."""
