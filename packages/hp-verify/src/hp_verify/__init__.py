"""Any training job, recorded from outside and compared with another, without a change of it."""

__all__ = ["__version__"]
__version__ = "0.1.0"
