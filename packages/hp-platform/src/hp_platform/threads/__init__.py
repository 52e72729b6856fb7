"""What a thread hands to its helpers, what it is doing, its process groups, its turn on a core."""
