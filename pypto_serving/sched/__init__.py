"""Scheduling: decide which tokens of which requests a step computes. No I/O, no clock, no torch."""
