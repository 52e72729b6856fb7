"""Operators: what each reads, writes and launches on a GPU, and when the host waits for it."""
