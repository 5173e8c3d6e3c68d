"""Chat messages, what encodes them and what reads outputs, by model family."""
