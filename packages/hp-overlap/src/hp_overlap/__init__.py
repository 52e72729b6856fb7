"""Overlap of one microbatch's forward with another's backward, deadlock-free by construction."""

__all__ = ["__version__"]
__version__ = "0.1.0"
