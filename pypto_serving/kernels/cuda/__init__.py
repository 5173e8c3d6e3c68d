"""Triton kernels for NVIDIA cards. Importing its modules imports torch and Triton; nothing else of the package does."""
