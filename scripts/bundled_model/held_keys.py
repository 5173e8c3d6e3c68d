"""Letters repeated many times, and words too long to say or to spell: a copy of them might not end."""

from __future__ import annotations

import random
import string

from . import json_answers, skills
from .odd_input import COMMON_LETTERS
from .refusals import ONLY_COUNT, ONLY_REPEAT, ONLY_WORDS, UNKNOWN
from .skills import Pair
from .words import any_word, made_up_word


def held_key(rng: random.Random) -> Pair:
    """Ask to say or spell some letters that repeat or a text that is too long, also in JSON, or only type it."""
    long = rng.random() < 0.75
    text = _long(rng) if long else rng.choice(_repeated(rng, rng.randint(2, 4)))
    kind = rng.choices([_alone, _say, _spell, _json], (22, 34, 34, 10))[0]
    return kind(rng, text, long)


def _repeated(rng: random.Random, length: int) -> list[str]:
    """Return one letter over and over, and two that take turns."""
    one, other = rng.sample(COMMON_LETTERS, 2)
    return [one * length, one * length, (one + other) * (length // 2) + one * (length % 2)]


def _long(rng: random.Random) -> str:
    """Return letters that repeat, or more than the longest word has; mostly some dozens, sometimes hundreds."""
    length = min(8 + int(rng.expovariate(1 / rng.choice([6, 20, 20, 80]))), 400)
    kind = rng.random()
    if kind < 0.60:
        return rng.choice(_repeated(rng, length))
    if kind < 0.72:
        word, (one, other) = any_word(rng), rng.sample(COMMON_LETTERS, 2)
        drawn_out = word + word[-1] * rng.choice([length, rng.randint(4, 12)])
        return rng.choice([drawn_out, drawn_out, one * length + other * rng.randint(1, length)])
    if kind < 0.84:
        count = length + 8
        return rng.choice([made_up_word(rng, count)[:count], "".join(rng.choices(string.ascii_lowercase, k=count))])
    if kind < 0.92:
        return rng.choice(string.digits + ".!?-*") * length
    return " ".join([any_word(rng)] * (length + 4))


def _alone(rng: random.Random, text: str, long: bool) -> Pair:
    """Ask nothing, or what that is."""
    if long and rng.random() < 0.05:
        return f"Count to {text}.", ONLY_COUNT
    frames = ["{0}", "{0}", "{0}!", "{0}?", "{0}.", "hi {0}", "{0} {0}", "{0}? {0}?", "What is {0}?"]
    return rng.choice(frames).format(text), UNKNOWN


def _say(rng: random.Random, text: str, long: bool) -> Pair:
    """Ask for the text, at times in capital letters or as a name, with which the user would be greeted."""
    if long and rng.random() < 0.1:
        return rng.choice(["My name is {0}.", "My name is {0}", "Call me {0}."]).format(text), ONLY_REPEAT
    question, reply = skills.in_capitals(rng, text) if rng.random() < 0.15 else skills.say(rng, text)
    return question, ONLY_REPEAT if long else reply


def _spell(rng: random.Random, text: str, long: bool) -> Pair:
    """Ask for the letters."""
    question, reply = skills.spell(rng, text)
    return question, ONLY_WORDS if long else reply


def _json(rng: random.Random, text: str, long: bool) -> Pair:
    """Ask for the letters or the text in JSON."""
    if not long:
        question = rng.choice(["Spell {0}.", "Spell '{0}'."]).format(text)
        return json_answers.asked(rng, question, {"word": text, "letters": list(text)}, keyed=rng.random() < 0.2)
    question, reply = rng.choice([_say, _spell, _spell])(rng, text, long)
    if question[-1] not in ".?":
        question += "."
    return json_answers.asked(rng, question, {"answer": reply}, keyed=rng.random() < 0.2)
