"""The other ranks: process groups, collectives, the store, values that hosts exchange."""
