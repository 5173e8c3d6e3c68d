"""Bodies that are refused with a 400: the body, the field that the error names, and words of its message."""

from __future__ import annotations

from typing import Any

HELLO = {"role": "user", "content": "hello"}

BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "prompt[0] is an empty list"),
    ({"prompt": ["hello", ""]}, "prompt", "prompt[1] is empty"),
    ({"prompt": [1, "a"]}, "prompt", "'a'"),
    ({"prompt": [True]}, "prompt", "True"),
    ({"prompt": [[1], "a", 2.5]}, "prompt", "prompt[2]"),
    ({"prompt": {"a": 1}}, "prompt", "must be a string"),
    ({"prompt": [10**9]}, "prompt", "1000000000"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [5] * 512}, "prompt", "512 tokens"),
    ({"prompt": [5] * 600}, "prompt", "600 tokens"),
    ({"prompt": "a" * 100, "max_tokens": 1000, "truncate_prompt_tokens": -1}, "max_tokens", "1000"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", "between 0 and 2147483647"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "integer"),
    ({"prompt": "a", "temperature": -1}, "temperature", "between 0 and 100"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "number"),
    ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
    ({"prompt": "a", "min_p": 2}, "min_p", "between 0 and 1"),
    ({"prompt": "a", "top_k": -5}, "top_k", "0 or -1"),
    ({"prompt": "a", "n": 0}, "n", "between 1 and 128"),
    ({"prompt": ["a"] * 5, "n": 128}, "prompt", "640 sequences, but must make at most 512"),
    ({"prompt": "a", "n": True}, "n", "integer"),
    ({"prompt": "a", "seed": 2**64}, "seed", "64-bit"),
    ({"prompt": "a", "stop": [1]}, "stop", "list of strings"),
    ({"prompt": "a", "stop": ""}, "stop", "not empty"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16"),
    ({"prompt": "a", "n": 128, "stop": ["ab" * 513] * 16}, "stop", "1026 characters long, but must be at most 1024"),
    ({"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
    ({"prompt": "a", "n": 128, "cache_salt": "x" * 1025}, "cache_salt", "1025 characters"),
    ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"prompt": "a", "stop_token_ids": [10**4000]}, "stop_token_ids", "token ids"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens", "max_tokens"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"prompt": "a", "stream_options": {}}, "stream_options", "stream = true"),
    ({"prompt": "a", "echo": "yes"}, "echo", "true or false"),
    ({"prompt": "a", "priority": 2**31}, "priority", "priority is 2147483648, but must be between -2147483647 and"),
    ({"prompt": "a", "priority": "high"}, "priority", "integer"),
    ({"prompt": "a", "priority": 0.5}, "priority", "integer"),
    ({"prompt": "a", "timeout": 0}, "timeout", "greater than 0"),
    ({"prompt": "a", "timeout": "1"}, "timeout", "number"),
    ({"prompt": "a", "timeout": 1e9}, "timeout", "86400"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt", "cache_salt is empty; send text, or leave it out"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt", "string"),
    ({"prompt": "a", "frequency_penalty": 2.5}, "frequency_penalty", "between -2 and 2"),
    ({"prompt": "a", "presence_penalty": -2.1}, "presence_penalty", "between -2 and 2"),
    ({"prompt": "a", "presence_penalty": "1"}, "presence_penalty", "number"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "between 0.01 and 100"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", "logit_bias of 5 is 101.0, but must be between -100"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias", "the key 'a', but must map token ids"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias", "the key '-1'"),
    ({"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias", "1000000 is not between 0 and"),
    ({"prompt": "a", "logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"prompt": "a", "logit_bias": [[5, 1]]}, "logit_bias", "object"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "empty, but must be at least one"),
    ({"prompt": "a", "allowed_token_ids": [10**6]}, "allowed_token_ids", "1000000 is not between 0 and"),
    ({"prompt": "a", "allowed_token_ids": [1] * 1025}, "allowed_token_ids", "at most 1024"),
    ({"prompt": "a", "bad_words": "x"}, "bad_words", "must be a list"),
    ({"prompt": "a", "bad_words": [" "]}, "bad_words", "not empty or white space"),
    ({"prompt": "a", "bad_words": ["x"] * 129}, "bad_words", "at most 128"),
    ({"prompt": "a", "bad_words": ["x" * 129]}, "bad_words", "129 characters long, but must be at most 128"),
    ({"prompt": "a", "bad_words": [f"{i} {'!?' * 50}" for i in range(50)]}, "bad_words", "tokens long, but must be at"),
    ({"prompt": "a", "n": 5, "best_of": 4}, "best_of", "between n, which is 5, and 128"),
    ({"prompt": "a", "suffix": "z"}, "suffix", "not supported"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20"),
]


def _function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "now", **fields}}


def _deep(levels: int) -> dict[str, Any]:
    return {"items": _deep(levels - 1)} if levels else {"type": "string"}


NOW = _function()
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "is 'hi', but must be a list"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "image_url"),
    ({"messages": [HELLO], "top_logprobs": 3}, "top_logprobs", "logprobs = true"),
    ({"messages": [HELLO], "logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"messages": [HELLO], "tools": [{"type": "function"}]}, "tools[0]", "must be {'type': 'function'"),
    ({"messages": [HELLO], "tools": [NOW, NOW]}, "tools[1].function.name", "like tools[0].function.name"),
    ({"messages": [HELLO], "tools": [NOW] * 1025}, "tools", "at most 1024"),
    ({"messages": [HELLO], "tools": [_function(name="a b")]}, "tools[0].function.name", "letters, digits"),
    ({"messages": [HELLO], "tools": [_function(name="a" * 129)]}, "tools[0].function.name", "at most 128 letters"),
    ({"messages": [HELLO], "tools": [_function(description={})]}, "tools[0].function.description", "must be a string"),
    ({"messages": [HELLO], "tools": [_function(parameters=[])]}, "tools[0].function.parameters", "a JSON schema"),
    ({"messages": [HELLO], "tools": [_function(parameters=_deep(65))]}, "tools[0].function.parameters", "64 levels"),
    ({"messages": [HELLO], "tools": [_function(strict=1)]}, "tools[0].function.strict", "true or false"),
    ({"messages": [HELLO], "tools": [{"type": "custom", "custom": {}}]}, "tools[0]", "'function'"),
    ({"messages": [HELLO], "tool_choice": "any"}, "tool_choice", "'required'"),
    ({"messages": [HELLO], "tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"messages": [HELLO], "tool_choice": {"type": "function"}}, "tool_choice.function.name", "is missing"),
    (
        {"messages": [HELLO], "tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
        "is 'x', but the names in tools are ['now']",
    ),
    (
        {"messages": [HELLO], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
        "between 1 and",
    ),
    ({"messages": [HELLO], "functions": [{}]}, "functions", "send that"),
    ({"messages": [HELLO], "continue_final_message": True}, "continue_final_message", "last message of the assistant"),
    (
        {"messages": [HELLO], "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "both true",
    ),
    ({"messages": [HELLO], "chat_template": "x"}, "chat_template", "runs without the option"),
    ({"messages": [HELLO], "documents": [{}] * 1025}, "documents", "1024"),
    ({"messages": [HELLO], "reasoning_effort": "most"}, "reasoning_effort", "must be one of none, minimal"),
    ({"messages": [HELLO], "reasoning_effort": 3}, "reasoning_effort", "is 3, but must be one of none, minimal"),
    ({"messages": [HELLO], "thinking_token_budget": -1}, "thinking_token_budget", "is -1, but must be at least 0"),
    ({"messages": [HELLO], "service_tier": 5}, "service_tier", "is 5, but must be a string"),
    ({"messages": [HELLO, {"role": "assistant", "tool_calls": 5}]}, "messages[1].tool_calls", "must be a list"),
    (
        {"messages": [HELLO, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "messages[1].tool_calls[0].function.name",
        "is missing",
    ),
    (
        {"messages": [HELLO, {"role": "assistant", "tool_calls": [_function(arguments=[])]}]},
        "messages[1].tool_calls[0].function.arguments",
        "must be a JSON object",
    ),
    ({"messages": [HELLO, {"role": "assistant", "reasoning": 5}]}, "messages[1].reasoning", "must be a string"),
    ({"messages": [HELLO], "response_format": {"type": "yaml"}}, "response_format", "is 'yaml', but must be text"),
    ({"messages": [HELLO], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages", "512 tokens"),
    ({"messages": [HELLO], "max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0, but"),
]


def names_of(bad: list[tuple[dict[str, Any], str, str]]) -> list[str]:
    """Names of the cases in reports."""
    return [f"{param}-{i}" for i, (_, param, _) in enumerate(bad)]
