"""What an operator reads, writes and launches on a GPU, and when the host waits for it."""
