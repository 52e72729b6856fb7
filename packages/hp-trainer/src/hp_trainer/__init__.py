"""One training run: its config, layout, model, loop and launcher."""

__all__ = ["__version__"]
__version__ = "0.1.0"
