"""Frozen values and messages, by subject. Imports only the standard library, msgspec and numpy."""
