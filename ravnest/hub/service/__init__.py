"""The hub's program: sockets, disk, admission."""
