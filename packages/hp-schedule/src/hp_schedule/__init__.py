"""Pipeline schedules as data: generate, prove, simulate, draw and run (planning needs no torch)."""

__all__ = ["__version__"]
__version__ = "0.1.0"
