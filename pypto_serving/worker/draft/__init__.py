"""Drafts of rows: tokens that may come next, and are verified beside the last one.

- `ngram.py`: looks them up in the row's own tokens.
- `pacing.py`: how many of them pay.
- `drafts.py`: brings both together for a batch.
"""
