"""What each module of a model computes and holds, and what machines can do."""
