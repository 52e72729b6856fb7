"""Which keys a query may see, as data, and by blocks."""
