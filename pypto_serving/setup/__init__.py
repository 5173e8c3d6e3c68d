"""Decide everything before anything starts: options, defaults, memory plan, facts about the machine, model files."""
