"""What all rooms stand on: files written whole, opened folders, keys of random numbers."""
