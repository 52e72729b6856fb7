"""The choice of experts for each token, and equal load of the experts."""
