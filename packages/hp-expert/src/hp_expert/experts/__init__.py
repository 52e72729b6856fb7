"""Experts with stacked weights, and the arithmetic of them."""
