"""State that a thread hands to helpers, words for its work, and its process groups."""
