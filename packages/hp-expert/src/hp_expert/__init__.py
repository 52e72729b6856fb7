"""Expert parallelism for mixture-of-experts models: stateless dispatch, one host read per layer."""

__all__ = ["__version__"]
__version__ = "0.1.0"
