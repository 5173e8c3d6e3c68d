"""Run one generation: prompts in, deltas of its choices out.

Every endpoint and the Python API translate to and from this one form. It knows nothing of HTTP or of any endpoint's
JSON.
"""
