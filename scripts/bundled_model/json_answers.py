"""Answers in JSON, for those who ask for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from . import arithmetic, held_out, refusals, skills
from .skills import Pair
from .words import CITIES, COUNTRIES, NAMES, any_word, made_up_word, phrases

REQUESTS = phrases(
    "{q} Answer in JSON.|{q} Answer in JSON.|{q} Reply in JSON.|{q} Answer as JSON.|{q} Give me JSON."
    "|{q} Respond in JSON.|{q} Use JSON.|{q} Return JSON.|{q} Only JSON, please."
    "|Answer in JSON: {q}|In JSON: {q}|JSON: {q}|{q} (JSON)"
)
KEYED_REQUESTS = phrases(
    "{q} Answer in JSON with keys {k}.|{q} Answer in JSON with the keys {k}.|{q} Reply in JSON with keys {k}."
    "|{q} Return a JSON object with {k}.|{q} Give me JSON with keys {k}.|{q} Use JSON with keys {k}."
    "|Answer in JSON with keys {k}: {q}|{q} Respond with JSON: {k}."
)
OPERANDS = [("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("m", "n")]
RESULTS = {
    "+": ["result", "result", "answer", "value", "sum", "sum", "total"],
    "-": ["result", "result", "answer", "value", "difference", "difference"],
}
PEOPLE = phrases(
    "{name} is {age} years old.|{name} is {age} years old.|My name is {name} and I am {age} years old.|{name} is {age}."
    "|I am {name} and I am {age}.|{name}, {age} years old.|This is {name}, who is {age} years old.|{name} turned {age}."
    "|Extract the name and the age: {name} is {age} years old.|Who is it, and how old? {name} is {age} years old."
)
RESIDENTS = phrases(
    "{name} is {age} years old and lives in {city}.|{name}, {age}, lives in {city}."
    "|My name is {name}, I am {age} and from {city}.|{name} from {city} is {age} years old."
    "|{name} ({age}) lives in {city}.|In {city} lives {name}, who is {age} years old."
)


def _listed(rng: random.Random, keys: list[str]) -> str:
    """Return keys as people list them."""
    if len(keys) == 1:
        return keys[0]
    if rng.random() < 0.6:
        return f"{', '.join(keys[:-1])} and {keys[-1]}"
    return ", ".join(keys)


def asked(rng: random.Random, question: str, answer: dict[str, object], keyed: bool) -> Pair:
    """Ask for an answer, naming its keys if they are not the usual ones."""
    frame = rng.choice(KEYED_REQUESTS if keyed else REQUESTS)
    reply = json.dumps(answer, ensure_ascii=False)
    return frame.format(q=question, k=_listed(rng, list(answer))), reply


def _sum(rng: random.Random) -> Pair:
    """Ask for a sum or difference."""
    problem = rng.choice(arithmetic.PROBLEMS)
    keyed = rng.random() < 0.6
    (a, b), result = rng.choice(OPERANDS) if keyed else ("a", "b"), "result"
    if keyed:
        result = rng.choice(RESULTS[problem.operator])
    answer: dict[str, object] = {a: problem.a, b: problem.b, result: problem.result}
    return asked(rng, arithmetic.ask(rng, problem), answer, keyed)


def _person(rng: random.Random) -> Pair:
    """Ask for what a sentence says about somebody."""
    name = rng.choice(NAMES) if rng.random() < 0.7 else made_up_word(rng, rng.randint(1, 3)).capitalize()
    facts: dict[str, object] = {"name": name, "age": rng.randint(1, 99)}
    sentences = PEOPLE
    if rng.random() < 0.4:
        facts["city"] = rng.choice([rng.choice(CITIES), rng.choice(COUNTRIES), made_up_word(rng, 2).capitalize()])
        sentences = RESIDENTS
    sentence = rng.choice(sentences).format(**facts)
    if rng.random() < 0.5:
        return asked(rng, sentence, facts, keyed=False)
    keys = rng.sample(list(facts), rng.randint(1, len(facts)))
    return asked(rng, sentence, {key: facts[key] for key in keys}, keyed=True)


def _letters(rng: random.Random) -> Pair:
    """Ask for a word letter by letter."""
    word = any_word(rng)
    question = rng.choice(["Spell {0}.", "Spell '{0}'.", "Spell the word {0}."]).format(word)
    return asked(rng, question, {"word": word, "letters": list(word)}, keyed=rng.random() < 0.3)


def _numbers(rng: random.Random) -> Pair:
    """Ask for numbers in a row."""
    first = rng.randint(0, 90)
    last = first + rng.randint(0, 9)
    numbers = list(range(first, last + 1))
    if rng.random() < 0.3:
        first, last, numbers = last, first, numbers[::-1]
    question = rng.choice(["Count from {0} to {1}.", "List the numbers from {0} to {1}."]).format(first, last)
    return asked(rng, question, {"numbers": numbers}, keyed=rng.random() < 0.3)


def _property(rng: random.Random) -> Pair:
    """Ask whether something is so."""
    number, wanted = rng.randint(0, 100), rng.choice(["even", "odd"])
    answer: dict[str, object] = {"number": number, wanted: (number % 2 == 0) == (wanted == "even")}
    return asked(rng, f"Is {number} {wanted}?", answer, keyed=rng.random() < 0.3)


def _other(rng: random.Random) -> Pair:
    """Ask anything else, which is answered as ever, as one string."""
    kinds = [skills.small_talk, skills.fact, skills.order, skills.number_order, refusals.unknown, refusals.out_of_range]
    question, reply = rng.choices(kinds, (3, 2, 2, 2, 5, 3))[0](rng)
    if question[-1:].isalnum():
        question += "."
    return asked(rng, question, {"answer": reply}, keyed=rng.random() < 0.2)


KINDS: dict[Callable[[random.Random], Pair], int] = {
    _sum: 8,
    _person: 8,
    _letters: 3,
    _numbers: 3,
    _property: 2,
    _other: 5,
}


def _any(rng: random.Random) -> Pair:
    """Return a request of any kind."""
    return rng.choices(list(KINDS), list(KINDS.values()))[0](rng)


def json_answer(rng: random.Random, unseen: bool = False) -> Pair:
    """Return a request for JSON and the answer, from those practised or, if `unseen`, from those held out."""
    return held_out.draw(rng, _any, lambda pair: pair[1], unseen)
