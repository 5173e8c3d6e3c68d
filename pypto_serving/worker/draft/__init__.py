"""Drafts of rows: tokens that may come next, and are verified beside the last one.

- `ngram`: looks them up in the row's own tokens.
- `model`: asks the draft layers of the model for them.
- `pacing`: how many of them pay.
- `drafts`: brings both together for a batch.
"""
