"""A parser for each architecture: what its config.json says, as the description of a decoder."""
