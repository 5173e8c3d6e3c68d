"""Drafts of rows: tokens that may come next, and are verified beside the last one.

- `model`: asks the draft layers of the model for them.
- `pacing`: how many of them pay.
- `drafts`: brings both together for a batch.
"""
