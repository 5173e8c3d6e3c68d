"""Scheduling: decide which tokens of which requests the next step computes. No I/O, no clock, no torch."""
