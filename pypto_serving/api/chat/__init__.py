"""Chat messages, their encoders and the parsers of outputs, by model family."""
