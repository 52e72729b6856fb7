"""What a thread hands to its helpers, what it is doing, and which process groups are its."""
