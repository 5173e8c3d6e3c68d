"""Backends: one file or folder each, listed in `backend/defaults.py`. Only `backend/x.py` imports the runtime of x."""
