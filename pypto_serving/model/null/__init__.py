"""Models without weights, for the null backend."""
