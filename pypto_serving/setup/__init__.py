"""Decide the configuration before a start: options, defaults, memory plan, facts about the machine, model files."""
