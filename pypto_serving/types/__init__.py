"""Frozen values and wire structs, by subject. Imports only the standard library, msgspec and numpy."""
