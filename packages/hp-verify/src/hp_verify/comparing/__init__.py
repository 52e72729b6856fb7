"""Recordings of a job and its reference: joined over ranks, laid beside each other, explained."""
