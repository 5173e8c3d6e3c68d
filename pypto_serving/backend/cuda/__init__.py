"""The backend for NVIDIA cards. Importing its modules imports torch and Triton."""
