"""The tokenizer: byte-level BPE with the released models' pre-tokenizer, and the ChatML template with tools."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .arithmetic import all_problems
from .chats import SYSTEM_MESSAGES, turns
from .practice import Practice

VOCABULARY = 640
END_OF_TEXT, START, END = SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# One digit per token: numbers are then always seen the same way.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '<tools>\\n' }}
    {%- for tool in tools %}
        {%- set parameters = tool.function.parameters or {} %}
        {{- tool.function.name + '(' + (parameters.properties or {}) | join(', ') + ')\\n' }}
    {%- endfor %}
    {{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- set arguments = call.function.arguments %}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(seed: int, chats: int = 4000) -> Tokenizer:
    """Learn the merges from generated chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(seed)
    practice = Practice(all_problems(held_out=False))
    roles = ["system\n", "user\n", "assistant\n"] * chats
    pairs = (turn for _ in range(chats) for turn in turns(rng, practice, 8, arithmetic_share=0.2))
    text = [piece for turn in pairs for piece in (turn.question, turn.reply)]
    tokenizer.train_from_iterator([*roles, *SYSTEM_MESSAGES * 50, *text], trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_position: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template inside the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START, END],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class Encoder:
    """Turns pieces of a chat into token ids, each with a mark that says whether the model has to learn it."""

    def __init__(self, tokenizer: Tokenizer):
        """Keep the tokenizer."""
        self.tokenizer = tokenizer

    def message(self, role: str, content: str) -> list[int]:
        """Encode one complete message."""
        return self.tokenizer.encode(f"{START}{role}\n{content}{END}\n").ids

    def turn(self, question: str, reply: str) -> tuple[list[int], list[bool]]:
        """Encode a question and its reply; the reply and its end mark are to be learnt."""
        prompt = self.prompt(question)
        answer = self.tokenizer.encode(f"{reply}{END}").ids
        after = self.tokenizer.encode("\n").ids
        learnt = [False] * len(prompt) + [True] * len(answer) + [False] * len(after)
        return prompt + answer + after, learnt

    def prompt(self, question: str) -> list[int]:
        """Encode a question up to the point at which the model starts to reply."""
        return self.message("user", question) + self.tokenizer.encode(f"{START}assistant\n").ids
