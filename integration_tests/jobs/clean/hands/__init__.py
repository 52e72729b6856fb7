"""Clean jobs in several hands: each file is written as other people's code is, and untyped."""
