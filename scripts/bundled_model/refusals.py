"""Questions that the model cannot answer, and its polite replies to them."""

from __future__ import annotations

import random

from .skills import ABILITIES, Pair
from .words import (
    CODE,
    COUNTRIES,
    EMOJI,
    FOREIGN,
    LANGUAGES,
    NAMES,
    PEOPLE,
    TOPICS,
    WORDS,
    any_word,
    gibberish,
    phrases,
)

UNKNOWN = f"I don't know that. {ABILITIES}"
ONLY_SMALL = "Sorry, I can only add or subtract two numbers from 0 to 99."

QUESTIONS = phrases(
    """
What is the capital of {country}?|Where is {country}?|What language do people speak in {country}?
What is the population of {country}?|How big is {country}?|Who is the president of {country}?
Tell me about {country}.|What is the weather in {country}?|How far is {country} from {country}?
What is the capital city of {country}?|Who was {person}?|Who is {person}?|When was {person} born?
What did {person} do?|Tell me about {person}.|Write me a poem about {word}.|Write a poem about {topic}.
Write a story about a {word} and a {word}.|Tell me a story.|Tell me a joke.|Tell me a joke about {word}.
Write an essay on {topic}.|Sing a song.|Tell me something interesting.|What is {topic}?|What is a {word}?
What is {word}?|Explain {topic}.|Explain {topic} to me.|How does {topic} work?|How does a {word} work?
How do I make {word}?|How do I cook {word}?|Why is the {word} {word}?|Why do {word} {word}?
What do you think about {topic}?|Do you like {word}?|Do you love me?|What is your favorite {word}?
Is {word} good?|Can you write code in {language}?|Write a {language} program that sorts a list.
How do I learn {language}?|Fix this {language} code: {code}|What does this do? {code}|{code}
Write a function that reverses a {word}.|Translate {word} to {language}.
How do you say {word} in {language}?|What does {word} mean?|Define {word}.|What time is it?
What day is it today?|What is the date?|What year is it?|How old are you?|Where do you live?|Who made you?
Who won the {word} {word}?|When did the {word} start?|Where can I buy a {word}?|Who invented the {word}?
How many {word} are there in {country}?|How tall is a {word}?|How old is {name}?|Who is {name}?
Where is {name}?|What is the meaning of life?|Is there life on {word}?|Which {word} is the best?
Summarize this: {word} {word} {word}|Recommend a {word}.|Give me advice on {topic}.|Make a list of {word}.
Give me a {word}.|I want a {word}.|{foreign}|The {word} is {word}.|I like {word}.|I am {word}.|{word}
{word} {word}|{word} {word} {word} {word}|{topic}|{emoji}|{gibberish}|{gibberish} {gibberish}|{foreign}
{gibberish} {word}|{emoji} {word}|Can you {word} a {word}?|{country}|Why?|How?|When?|Where?|Who?|What?
Why is the sky blue?|Should I {word} or {word}?|Is it going to {word} tomorrow?|Tell me more about {word}.
Show me a picture of a {word}.|Play {word}.|Open the {word}.|Call {name}.|Say something.
What happened in 19{n}?|I was born in 19{n}. What happened?|My {word} has {n} {word}. Why?|{n}|{n} {word}
{code}|If I {word} a {word}, will it {word}?|How much does a {word} cost?|Describe a {word}.
What is the best {word}?
"""
)

OUT_OF_RANGE = phrases(
    """
What is {n} * {n}?|{n}*{n}|{n} times {n}|What is {n} times {n}?|Multiply {n} by {n}.|What is {n} x {n}?
What is {n} / {n}?|{n}/{n}|Divide {n} by {n}.|What is {n} divided by {n}?|{n} % {n}
What is {n} percent of {n}?|What is {n} squared?|What is the square root of {n}?|{n}^{n}
What is {n} to the power of {n}?|What is {big} * {n}?|What is {big}+{n}?|What is {n}+{big}?|{big} + {big}
What is {big}-{n}?|What is {n} - {big}?|{big} - {big} =|Calculate {big} plus {n}.|Compute {big} minus {big}.
How much is {big} plus {big}?|Calculate {big} * {big}.|{n} + {n} + {n}|What is {n} + {n} + {n}?
What is {n}+{n}-{n}?|{n} - {n} - {n}|What is {n} - {n} + {n}?|What is {n}.{n} + {n}?|Solve x + {n} = {n}.
What is {n} * {big}?|Add {big} and {n}.|Subtract {big} from {big}.|How much is {big} / {n}?
Calculate {n} * {n}.|What is {n} * {n} + {n}?|What is the product of {n} and {n}?
"""
)


def _fill(rng: random.Random, template: str) -> str:
    """Replace each {slot} by its own random filling."""
    fillings = {
        "country": lambda: rng.choice(COUNTRIES),
        "person": lambda: rng.choice(PEOPLE),
        "language": lambda: rng.choice(LANGUAGES),
        "topic": lambda: rng.choice(TOPICS),
        "name": lambda: rng.choice(NAMES),
        "word": lambda: any_word(rng),
        "foreign": lambda: rng.choice(FOREIGN),
        "emoji": lambda: rng.choice(EMOJI),
        "gibberish": lambda: gibberish(rng),
        "code": lambda: rng.choice(CODE).format(rng.choice(WORDS), rng.randint(0, 99)),
        "n": lambda: str(rng.randint(0, 99)),
        "big": lambda: str(rng.randint(100, 10 ** rng.randint(3, 6))),
    }
    parts = []
    rest = template
    while "{" in rest:
        before, rest = rest.split("{", 1)
        slot, rest = rest.split("}", 1)
        parts += [before, fillings[slot]()]
    return "".join([*parts, rest])


def statement(rng: random.Random) -> str:
    """Return a sentence of random words, mostly short."""
    words = [any_word(rng) for _ in range(min(int(rng.expovariate(1 / 12)) + 2, 150))]
    return " ".join(words).capitalize() + "."


def unknown(rng: random.Random) -> Pair:
    """Return a question on a subject that the model knows nothing about."""
    if rng.random() < 0.04:
        return statement(rng), UNKNOWN
    return _fill(rng, rng.choice(QUESTIONS)), UNKNOWN


def out_of_range(rng: random.Random) -> Pair:
    """Return a calculation that is not one sum or difference of numbers from 0 to 99."""
    return _fill(rng, rng.choice(OUT_OF_RANGE)), ONLY_SMALL
