"""Scheduling decisions: which tokens of which requests the next step computes. Pure: no I/O, no clock, no torch."""
