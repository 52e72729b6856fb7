"""Which ranks form which stage, and how an activation lies over them. Needs no torch."""
