"""Context parallelism: attention over sequences split across ranks."""

__all__ = ["__version__"]
__version__ = "0.1.0"
