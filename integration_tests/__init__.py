"""What needs several packages at once."""
