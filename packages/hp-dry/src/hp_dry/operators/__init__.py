"""Reads, writes and launches of each operator on a GPU, and its waits on the host."""
