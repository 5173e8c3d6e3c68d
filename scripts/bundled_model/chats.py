"""Whole chats: turns that may depend on earlier ones, an optional system message, and untidy typing."""

from __future__ import annotations

import random

from . import arithmetic, common_requests, held_keys, json_answers, odd_input, refusals, skills, tool_questions
from .practice import Practice, Turn
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
    (skills.small_talk, 6),
    (skills.fact, 2),
    (skills.counting, 18),
    (skills.number_order, 8),
    (skills.spelling, 16),
    (skills.order, 6),
    (skills.echo, 8),
    (refusals.unknown, 8),
    (odd_input.odd, 3),
    (refusals.out_of_range, 12),
    (refusals.other_skill, 9),
    (common_requests.common_request, 8),
    (held_keys.held_key, 14),
    (json_answers.json_answer, 40),
    (tool_questions.without_tools, 5),
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
UNCERTAIN = ["Are you sure?", "Really?", "Is that right?", "are you sure", "Is that correct?"]


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

    def __init__(self, rng: random.Random, practice: Practice, arithmetic_share: float):
        """Start an empty chat in which about `arithmetic_share` of the turns are sums and differences."""
        self.rng = rng
        self.practice = practice
        self.arithmetic_share = arithmetic_share
        self.name: str | None = None
        self.last_reply: str | None = None
        self.asked: set[Turn] = set()
        self.last_problem: arithmetic.Problem | None = None

    def system_message(self) -> str | None:
        """Return a system message for four chats in ten."""
        return self.rng.choice(SYSTEM_MESSAGES) if self.rng.random() < 0.4 else None

    def next_turn(self) -> Turn:
        """Return the next question and its reply."""
        turn = self.practice.again(self.rng)
        if turn is None or turn in self.asked:  # a reply that stands above would only be copied
            turn = self._new_turn()
        self.asked.add(turn)
        self.last_reply, self.last_problem = turn.reply, turn.problem
        return turn

    def _new_turn(self) -> Turn:
        roll = self.rng.random()
        if roll < self.arithmetic_share:
            return self._calculation()
        if roll < self.arithmetic_share + MEMORY_SHARE:
            return Turn(*self._memory(), alone=False)
        functions, weights = zip(*SKILLS, strict=True)
        skill = self.rng.choices(functions, weights)[0]
        question, reply = skill(self.rng)
        return Turn(untidy(self.rng, question) if skill in UNTIDY else question, reply)

    def _calculation(self) -> Turn:
        """Ask a problem, at times one about the previous result, which is to be declined if it is out of range."""
        if self.rng.random() < (0.15 if self.last_problem else 0.02):
            result = self.last_problem.result if self.last_problem else -1
            question, problem = arithmetic.change_of_result(self.rng, result)
            if problem.a not in arithmetic.NUMBERS:
                return Turn(untidy(self.rng, question), refusals.ONLY_SMALL, alone=False)
            if problem in self.practice.problems:
                return Turn(untidy(self.rng, question), problem.reply, problem, alone=False)
        problem = self.practice.problem(self.rng)
        question = arithmetic.ask(self.rng, problem, follow_up=self.last_reply is not None)
        if self.rng.random() < 0.04:
            question = f"{refusals.statement(self.rng)} {question}"
        return Turn(untidy(self.rng, question), problem.reply, problem)

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
        if kind < 0.8:
            sure = f"Yes, {self.last_problem.reply}" if self.last_problem else "I am sorry. Please ask me again."
            return self.rng.choice(UNCERTAIN), sure
        frames = [
            "Repeat your last answer.",
            "Say that again.",
            "Repeat that.",
            "What did you say?",
            "Can you repeat that?",
        ]
        return self.rng.choice(frames), self.last_reply or "I have not said anything yet."


def turns(rng: random.Random, practice: Practice, count: int, arithmetic_share: float = 0.5) -> list[Turn]:
    """Return the turns of one chat."""
    chat = Chat(rng, practice, arithmetic_share)
    return [chat.next_turn() for _ in range(count)]
