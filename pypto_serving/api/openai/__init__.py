"""Serve OpenAI's completions, chats, models, tokenizer and render endpoints."""
