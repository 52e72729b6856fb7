"""Pipeline stages with different tensor-parallel sizes, straight or U-shaped."""

__all__ = ["__version__"]
__version__ = "0.1.0"
