"""Distributed training of mixture-of-experts transformers, from a laptop to many GPUs."""

__all__ = ["__version__"]
__version__ = "0.1.0"
