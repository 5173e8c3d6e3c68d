"""The HTTP side: everything between a client's request and the engine. Never imports torch."""
