"""`replay`: what torch's caching allocator reserves for the requests of a trace."""
