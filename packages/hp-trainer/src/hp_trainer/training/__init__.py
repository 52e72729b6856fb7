"""The loop of one rank: batches, gradients, the update, metrics, reports."""
