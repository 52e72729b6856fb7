"""Transfer plans of tensors as data, their costs, and both as text. Needs no torch."""
