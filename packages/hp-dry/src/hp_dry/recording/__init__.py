"""Recorder of one device: operators, their lines in the program, and memory."""
