"""Layouts compared without running them: which are allowed, what they cost, which is best."""
