"""Compiled programs."""
