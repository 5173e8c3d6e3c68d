"""Qwen3 on NPUs: its compiled PyPTO programs, and their contract."""
