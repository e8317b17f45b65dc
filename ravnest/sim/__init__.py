"""A swarm on virtual time: the hub's own decisions, made-up nodes and links, no torch and no network."""
