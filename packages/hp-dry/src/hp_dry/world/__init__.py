"""Other ranks of a dry run: process groups, collectives, the store, values between hosts."""
