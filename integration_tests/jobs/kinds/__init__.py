"""Training loops of many kinds, by subject, each as its user would write it."""
