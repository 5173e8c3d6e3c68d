"""OpenAI's endpoints: request schemas, prompts, generations, and how they are written down as JSON and SSE."""
