"""Questions that the model cannot answer, and its polite replies to them."""

from __future__ import annotations

import random

from .skills import ABILITIES, Pair, hasty
from .words import (
    CODE,
    COUNTRIES,
    EMOJI,
    FOREIGN,
    LANGUAGES,
    NAMES,
    NUMBER_WORDS,
    PEOPLE,
    TOPICS,
    WORDS,
    any_word,
    gibberish,
    made_up_word,
    phrases,
)

UNKNOWN = f"I don't know that. {ABILITIES}"
ONLY_SMALL = "Sorry, I can only add or subtract two numbers from 0 to 99."
ONLY_COUNT = "Sorry, I can only count in steps of 1, from 0 to 100."
ONLY_KNOWN = "Sorry, I only know the numbers from 0 to 100."
ONLY_WORDS = "Sorry, I can only spell single words of up to 12 letters from a to z."
ONLY_REPEAT = "Sorry, I can only repeat a few words."

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
What is the best {word}?|Say the alphabet backwards.|List the days of the week backwards.|List the months backwards.
Print numbers {n} to {n}.|Continue: {n} {n} {n}|Go on: {n}, {n}, {n},|Is it {n}?|List all {word}.|Repeat everything.
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
Calculate {n} * {n}.|What is {n} * {n} + {n}?|What is the product of {n} and {n}?|{n} mod {n}|{n} ** {n}|{n}!
What is {n} mod {n}?|sqrt({n})|({n} + {n}) * {n}|What is ({n} - {n}) / {n}?|{n} +|+ {n}|{n} + x|What is {n}.{n} - {n}?
{n} + {n}.{n}|{n}.{n} + {n}.{n}|What is 0{n}+{n}?|What is {large} plus {n}?|What is {n} minus {large}?
{n}+{n}+{n}|{n}-{n}-{n}|{n}+{n}-{n}|{n}-{n}+{n}|What is {n}+{n}+{n}?|What is {n}-{n}-{n}?
{large} + {large}|{large} - {n}|What is {small} times {small}?|{small} times {n}|What is {n}/{n} + {n}/{n}?
"""
)

NEARLY = phrases(
    """
What is {near}+{n}?|What is {n}+{near}?|What is {near}-{n}?|What is {n}-{near}?|{near}+{n}|{n}+{near}|{near}-{n}
{n}-{near}|{near} + {n} =|{n} - {near} =|What is {near} + {n}?|What is {n} - {near}?|{near} plus {n}|{n} minus {near}
{near} - {near}|What is {near}+{near}?|Add {near} and {n}.|Subtract {n} from {near}.|How much is {near} minus {n}?
And {near} + {n}?|100-{n}|100+{n}|100 - {n}|100 + {n}|{n}+100|{n}-100|What is 100-{n}?|What is 100+{n}?|What is {n}+100?
"""
)

DIGITS = phrases(
    """
{d}+{d}+{d}|{d}+{d}+{d}|{d}-{d}-{d}|{d}+{d}-{d}|{d}-{d}+{d}|{d} + {d} + {d}|{d} - {d} - {d}|What is {d}+{d}+{d}?
What is {d} + {d} + {d}?|What is {d}-{d}-{d}?|What's {d}+{d}+{d}?|{d}+{d}+{d}+{d}|{d} + {d} - {d}|{d}+-{d}|{d}--{d}
What's {d}+-{d}?|What is {d}+-{d}?|{d} + -{d}|{d} - -{d}|What's {d}--{d}?|-{d}+{d}|-{d}-{d}|What's -{d}+{d}?|{d}!
What is -{d}+{d}?|{d}*{d}|{d}/{d}|What's {d}*{d}?|What is {d}/{d}?|{d} x {d}|+ {d}|{d} +|-{d}|{d}^{d}
"""
)

NEGATIVE = phrases(
    """
What is -{n}+{n}?|What is -{n}+{n}?|What is -{n} + {n}?|What is -{n}-{n}?|What is -{n} - {n}?|-{n}+{n}|-{n} + {n}
-{n}-{n}|-{n} - {n}|What is {n}+-{n}?|What is {n} + -{n}?|What is {n} - -{n}?|What is {n}--{n}?|{n} + -{n}|{n}+-{n}
{n} - -{n}|{n}--{n}|{n} + (-{n})|What is {n} - (-{n})?|(-{n}) + {n}|What is (-{n}) + (-{n})?|-{n} + -{n}|-{n} - -{n}
minus {n} plus {n}|What is minus {n} plus {n}?|What is minus {n} minus {n}?|What is negative {n} plus {n}?
negative {n} minus {n}|What is {n} plus minus {n}?|{n} minus minus {n}|What is {n} plus negative {n}?
Calculate -{n} + {n}.|Compute -{n} - {n}.|How much is -{n} plus {n}?|How much is -{n} minus {n}?|Add -{n} and {n}.
Add {n} to -{n}.|Subtract -{n} from {n}.|Subtract {n} from -{n}.|What is the sum of -{n} and {n}?|-{n} + {n} =|-{n}-{n}=
What is −{n} + {n}?|−{n} - {n}|What's -{n}+{n}?|Solve -{n} - {n}.|-{n} plus {n}|-{n} minus {n}|-{n}+{n}=|-{n}-{n}?
What is -{big}+{n}?|-{big} - {n}|minus {small} plus {small}|minus {small} minus {n}|Work out -{n}+{n}.|And -{n} + {n}?
"""
)

COUNTS = phrases(
    """
Count to {big}.|Count up to {big}.|Can you count to {big}?|Count from {n} to {big}.|Count down from {big}.
Count from {big} to {n}.|Count from {big} down to {n}.|Count from -{n} to {n}.|Count from {n} to -{n}.
Count down from {n} to -{n}.|List the numbers from {n} to {big}.|Count from {big} to {big}.|Count by {n} to {n}.
Count to {n} by {n}.|Count in steps of {n} from {n} to {n}.|Count from {n} to {n} by {n}.|Count to -{n}.
Count by twos to {n}.|List the even numbers up to {n}.|Count forever.|Count to infinity.|Count to a million.
Count to {n} and back.|Count backwards from {big}.|Count backwards from {big} to {n}.
"""
)

NUMBERS = phrases(
    """
What comes after {big}?|What comes before {big}?|What comes after -{n}?|What comes before -{n}?|What comes before 0?
Which number comes after {big}?|Which is larger, {n} or {big}?|Which is bigger, {big} or {n}?
Which is smaller, {big} or {big}?|Which is larger, -{n} or {n}?|Which is smaller, {n} or -{n}?|Is {big} even or odd?
Is {big} odd or even?|Is -{n} even or odd?|What comes after 100?
"""
)

REPETITIONS = ["Say {word} {n} times.", "Repeat '{word}' {n} times.", "Say hello {n} times."]

UNSPELLABLE = [
    "Spell {0}.",
    "Please spell {0}.",
    "How do you spell {0}?",
    "Spell {0} backwards.",
    "Reverse {0}.",
    "How do you spell {0} backwards?",
    "Write {0} backwards.",
    "Can you spell {0} backwards?",
    "How many letters are in {0}?",
]

LARGE_NUMBERS = phrases(
    "thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|a hundred|one hundred|two hundred|a thousand|a million"
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
        "n": lambda: str(rng.randint(0, 9 if rng.random() < 0.3 else 99)),
        "big": lambda: str(rng.randint(100, rng.choice([120, 200, *(10**k for k in (3, 3, 4, 5, 6, 12))]))),
        "near": lambda: str(rng.choice([100, rng.randint(100, 110), 10 * rng.randint(10, 99), rng.randint(100, 999)])),
        "d": lambda: str(rng.randint(0, 9)),
        "small": lambda: rng.choice(NUMBER_WORDS),
        "large": lambda: _large_number(rng),
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


def _large_number(rng: random.Random) -> str:
    """Return a number above twenty in words."""
    number = rng.choice(LARGE_NUMBERS)
    return f"{number}{rng.choice('- ')}{rng.choice(NUMBER_WORDS[1:10])}" if rng.random() < 0.4 else number


def unknown(rng: random.Random) -> Pair:
    """Return a question on a subject that the model knows nothing about."""
    if rng.random() < 0.04:
        return statement(rng), UNKNOWN
    return _fill(rng, rng.choice(QUESTIONS)), UNKNOWN


def out_of_range(rng: random.Random) -> Pair:
    """Return a calculation that is not one sum or difference of numbers from 0 to 99."""
    return _fill(rng, rng.choice(rng.choice([NEGATIVE, NEARLY, DIGITS, OUT_OF_RANGE, OUT_OF_RANGE]))), ONLY_SMALL


def other_skill(rng: random.Random) -> Pair:
    """Return a question that looks like a skill and goes beyond it."""
    kind = rng.random()
    if kind < 0.35:
        return hasty(rng, _fill(rng, rng.choice(COUNTS))), ONLY_COUNT
    if kind < 0.55:
        return hasty(rng, _fill(rng, rng.choice(NUMBERS))), ONLY_KNOWN
    if kind < 0.58:
        return _fill(rng, rng.choice(REPETITIONS)), ONLY_REPEAT
    if kind < 0.66:
        text = " ".join(any_word(rng) for _ in range(rng.randint(12, 40)))
        return rng.choice(["Say {0}.", "Repeat: {0}", "Repeat after me: {0}", "Say '{0}'."]).format(text), ONLY_REPEAT
    word = rng.choice(
        [
            " ".join(any_word(rng) for _ in range(rng.randint(2, 5))),
            made_up_word(rng, rng.randint(6, 12)).ljust(18, "a"),
            str(rng.randint(0, 10 ** rng.randint(1, 8))),
            any_word(rng) + str(rng.randint(0, 99)),
            any_word(rng) + rng.choice("-_'.@") + any_word(rng),
            any_word(rng)[:-1] + rng.choice("éèüöäñçøåß") + rng.choice(["", any_word(rng)[:3]]),
            rng.choice([text for text in FOREIGN if not text[:4].isascii()]).split()[0],
        ]
    )
    quoted = rng.choice(["{0}", "'{0}'", '"{0}"']).format(word)
    return hasty(rng, rng.choice(UNSPELLABLE).format(quoted)), ONLY_WORDS
