"""Serve clients: translate their requests for the engine and its outputs for them. Never imports torch.

Rooms, from the top down, each importing only those below: the files beside the rooms, which put the server together;
web, batch and reading; one family of endpoints each in openai, responses, anthropic, decisions and ollama; common,
what families share; generation, the one internal form; service, what generations share; grammars; prompting; chat;
settings and text; http, which knows no endpoint.
"""
