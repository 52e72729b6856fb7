"""Hooks of autograd, deferred weight gradients, what `torch.compile` leaves out of its graphs."""
