"""GGUF files: read them, and unpack them into checkpoint folders."""
