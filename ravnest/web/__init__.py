"""What every page of ours is made of: a gate, a server in a thread, streams of updates, files and styles."""
