"""Methods of exchange: keys gathered, keys in a ring, heads dealt out, both."""
