"""Who sends what of a tensor to whom, as data; its costs, and both as text. Needs no torch."""
