"""Tensors as messages: packed, described to the other end, and checked before they leave."""
