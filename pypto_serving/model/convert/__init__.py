"""Conversion of checkpoints to other formats, file by file; a killed conversion resumes. Torch-free."""
