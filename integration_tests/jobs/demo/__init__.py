"""What `hp-verify` finds in jobs of others: bugs of a zoo, and transformers' own layouts."""
