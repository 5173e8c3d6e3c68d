"""Decoders: one description by data, and the programs that compute it."""
