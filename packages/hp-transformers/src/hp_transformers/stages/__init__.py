"""Causal language models of transformers, trained as they are: cut into stages by their layers."""
