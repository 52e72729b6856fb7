"""What a layout would cost in memory and time, and which one is best."""

__all__ = ["__version__"]
__version__ = "0.1.0"
