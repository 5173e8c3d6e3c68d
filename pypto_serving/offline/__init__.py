"""The Python API: answer prompts and chats in the process, without HTTP."""
