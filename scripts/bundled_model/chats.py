"""Whole chats: turns that may depend on earlier ones, an optional system message, and untidy typing."""

from __future__ import annotations

import random

from . import arithmetic, refusals, skills
from .words import NAMES

SYSTEM_MESSAGES = [
    "You are a helpful assistant.",
    "You are Pip, a tiny demo model.",
    "You are a helpful, honest and concise assistant.",
    "You are a friendly chatbot.",
    "Answer briefly.",
    "You are a calculator.",
    "Be polite.",
    "You are an AI assistant. Answer the questions of the user.",
]

SKILLS = [
    (skills.small_talk, 8),
    (skills.fact, 3),
    (skills.counting, 8),
    (skills.number_order, 5),
    (skills.spelling, 13),
    (skills.order, 6),
    (skills.echo, 7),
    (refusals.unknown, 8),
    (refusals.out_of_range, 4),
]
UNTIDY = {
    skills.small_talk,
    skills.fact,
    skills.counting,
    skills.number_order,
    refusals.unknown,
    refusals.out_of_range,
}
MEMORY_SHARE = 0.08
SMALL_SHARE = 0.1  # single digits, which people ask most and which are few among all problems
DIFFERENCE_SHARE = 0.65  # differences are harder to learn than sums


def untidy(rng: random.Random, question: str) -> str:
    """Sometimes drop the case, the punctuation or the neatness of a question."""
    if rng.random() < 0.15:
        question = question.lower()
    elif rng.random() < 0.03:
        question = question.upper()
    if rng.random() < 0.2:
        question = question.rstrip(".?!")
    if rng.random() < 0.04:
        question = rng.choice([question.rstrip(".?!") + ", please", question.rstrip(".?!") + " please", question + "?"])
    if rng.random() < 0.04:
        question = (
            rng.choice(["Please ", "please ", "Hi, ", "Hello! ", "Hey Pip, ", "Um, ", "Quick question: "]) + question
        )
    if rng.random() < 0.03:
        question = rng.choice([" {0}", "{0} ", "{0}\n", "  {0}"]).format(question)
    return question or "?"


class Chat:
    """A chat under construction, and what has to be remembered to answer its next turn."""

    def __init__(self, rng: random.Random, arithmetic_share: float):
        """Start an empty chat in which about `arithmetic_share` of the turns are sums and differences."""
        self.rng = rng
        self.arithmetic_share = arithmetic_share
        self.name: str | None = None
        self.last_reply: str | None = None
        self.last_problem: arithmetic.Problem | None = None

    def system_message(self) -> str | None:
        """Return a system message for four chats in ten."""
        return self.rng.choice(SYSTEM_MESSAGES) if self.rng.random() < 0.4 else None

    def next_turn(self) -> skills.Pair:
        """Return the next question and its reply."""
        roll = self.rng.random()
        problem = None
        if roll < self.arithmetic_share:
            question, problem = self._calculation()
            question, reply = untidy(self.rng, question), problem.reply
        elif roll < self.arithmetic_share + MEMORY_SHARE:
            question, reply = self._memory()
        else:
            functions, weights = zip(*SKILLS, strict=True)
            skill = self.rng.choices(functions, weights)[0]
            question, reply = skill(self.rng)
            if skill in UNTIDY:
                question = untidy(self.rng, question)
        self.last_reply, self.last_problem = reply, problem
        return question, reply

    def _calculation(self) -> tuple[str, arithmetic.Problem]:
        """Ask a training problem, at times one about the previous result."""
        if self.last_problem and self.rng.random() < 0.15:
            change = arithmetic.change_of_result(self.rng, self.last_problem.result)
            if change:
                return change
        operator = "-" if self.rng.random() < DIFFERENCE_SHARE else "+"
        problems = arithmetic.SMALL_PROBLEMS if self.rng.random() < SMALL_SHARE else arithmetic.TRAINING_PROBLEMS
        problem = self.rng.choice(problems[operator])
        question = arithmetic.ask(self.rng, problem, follow_up=self.last_reply is not None)
        if self.rng.random() < 0.04:
            question = f"{refusals.statement(self.rng)} {question}"
        return question, problem

    def _memory(self) -> skills.Pair:
        """Ask about the user's name or about the previous reply."""
        kind = self.rng.random()
        if kind < 0.3:
            self.name = skills.new_name(self.rng, NAMES)
            frames = [
                "My name is {0}.",
                "My name is {0}",
                "Hi, my name is {0}.",
                "Call me {0}.",
                "Hello! My name is {0}.",
            ]
            return self.rng.choice(frames).format(self.name), f"Nice to meet you, {self.name}!"
        if kind < 0.7:
            frames = [
                "What is my name?",
                "what is my name",
                "Do you know my name?",
                "What's my name?",
                "Who am I?",
            ]
            reply = f"Your name is {self.name}." if self.name else "You have not told me your name."
            return self.rng.choice(frames), reply
        if self.last_problem and kind < 0.85:
            frames = ["Are you sure?", "Really?", "Is that right?", "are you sure", "Is that correct?"]
            return self.rng.choice(frames), f"Yes, {self.last_problem.reply}"
        frames = [
            "Repeat your last answer.",
            "Say that again.",
            "Repeat that.",
            "What did you say?",
            "Can you repeat that?",
        ]
        return self.rng.choice(frames), self.last_reply or "I have not said anything yet."


def turns(rng: random.Random, count: int, arithmetic_share: float = 0.5) -> list[skills.Pair]:
    """Return the turns of one chat."""
    chat = Chat(rng, arithmetic_share)
    return [chat.next_turn() for _ in range(count)]
