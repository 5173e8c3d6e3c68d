"""Backends: a file or folder each, which `backend/defaults.py` lists. Only `backend/x.py` imports x's runtime."""
