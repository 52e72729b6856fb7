"""Replay of a trace through a model of torch's caching allocator."""
