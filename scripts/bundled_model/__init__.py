"""Data, tokenizer, training and evaluation of the bundled demo model."""
