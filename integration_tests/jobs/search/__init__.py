"""A search for faults of released libraries: their features beside one process or plain tensors."""
