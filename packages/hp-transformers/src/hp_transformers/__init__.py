"""Causal models of transformers as stages of a run, and weights in and out."""

__all__ = ["__version__"]
__version__ = "0.1.0"
