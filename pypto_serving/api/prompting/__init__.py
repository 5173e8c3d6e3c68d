"""Turn text and chats into token ids: templates, prompts, seeds."""
