"""Which experts a token goes to, and what keeps them equally busy."""
