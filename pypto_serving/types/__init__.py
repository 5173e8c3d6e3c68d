"""Frozen values and wire structs, one file per wire. Imports only the standard library, msgspec and numpy."""
