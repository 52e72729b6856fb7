"""Differentiable collectives, sends and receives, shared memory, exchanges of FSDP2."""
