"""Experts under the names of Hugging Face's checkpoints, and stacked as modules hold them."""
