"""The second run around a first difference, and a program that shows it."""
