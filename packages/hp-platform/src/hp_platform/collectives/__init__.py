"""Differentiable collectives, sends and receives, shared memory, and what FSDP2 exchanges."""
