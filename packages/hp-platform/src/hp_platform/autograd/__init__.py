"""Hooks of autograd, functions outside compiled graphs, deferred weight gradients."""
