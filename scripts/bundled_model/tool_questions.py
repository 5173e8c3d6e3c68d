"""Questions that need a function, the calls that answer them, and what to say about their results."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import arithmetic, held_out
from .refusals import ONLY_SMALL, UNKNOWN
from .skills import Pair, hasty
from .tools import Call, calculate, calls_text, get_time, responses_text
from .words import CITIES, COUNTRIES, NAMES, NUMBER_WORDS, WORDS, made_up_word, phrases

FAILED = "Sorry, that did not work."
EXPRESSIONS = {
    **arithmetic.EXPRESSIONS,
    "*": ["{a}*{b}", "{a} * {b}", "{a} times {b}", "{a} x {b}", "{a} multiplied by {b}"],
    "/": ["{a}/{b}", "{a} / {b}", "{a} divided by {b}", "{a} over {b}"],
    "**": ["{a}^{b}", "{a} ** {b}", "{a}**{b}", "{a} to the power of {b}"],
}
FRAMES = [
    *arithmetic.FRAMES,
    *phrases(
        "Use the calculator: {e}|Use the calculator for {e}.|Please use a tool to compute {e}.|I want to know {e}."
        "|Can you calculate {e}?|Could you compute {e} for me?|What would {e} be?|Find {e}.|Evaluate {e}."
        "|Hello, what is {e}?|Can you work out {e}, please?|Tell me what {e} is.|Is there a quick answer to {e}?"
    ),
]
WHOLE_PHRASES = {
    "+": [
        *arithmetic.WHOLE_PHRASES["+"],
        *phrases(
            "What is the total of {a} and {b}?|A {w} costs {a} dollars and a {v} costs {b}. What do both cost?"
            "|{n} has {a} points and gets {b} more. How many points is that?"
            "|There are {a} {w}s and {b} {v}s. How many in all?"
        ),
    ],
    "-": [
        *arithmetic.WHOLE_PHRASES["-"],
        *phrases(
            "{n} had {a} {w}s and lost {b}. How many are left?|I had {a} dollars and spent {b}. How much is left?"
            "|How much more is {a} than {b}?|Of {a} {w}s, {b} are gone. How many remain?"
        ),
    ],
    "*": phrases(
        "Multiply {a} by {b}.|Multiply {a} and {b}.|What is the product of {a} and {b}?|The product of {a} and {b}?"
        "|A {w} costs {a} dollars. How much do {b} {w}s cost?|There are {a} boxes with {b} {w}s each. How many {w}s?"
        "|{n} works {a} hours for {b} dollars an hour. How much is that?|How many are {a} rows of {b} {w}s?"
    ),
    "/": phrases(
        "Divide {a} by {b}.|What do you get when you divide {a} by {b}?|Share {a} {w}s among {b} people."
        "|{n} splits {a} dollars among {b} friends. How much does each get?|How many times does {b} go into {a}?"
    ),
    "**": phrases("Raise {a} to the power of {b}.|What is {a} raised to {b}?|What is {a} to the power {b}?"),
}
COMPOUNDS = phrases(
    "{a} + {b} + {c}|{a} - {b} - {c}|{a} + {b} - {c}|{a} * {b} + {c}|{a} + {b} * {c}|{a} * {b} - {c}|({a} + {b}) * {c}"
    "|({a} - {b}) * {c}|{a} * ({b} + {c})|({a} + {b}) / {c}|{a} / {b} + {c}|{a} * {b} * {c}|{a} / ({b} - {c})"
)
TIMES = phrases(
    "What time is it in {c}?|What time is it in {c}?|What time is it in {c} now?|What time is it now in {c}?"
    "|What is the time in {c}?|What's the time in {c}?|Tell me the time in {c}.|Give me the time in {c}.|time in {c}"
    "|Do you know the time in {c}?|Do you know what time it is in {c}?|Can you tell me the time in {c}?"
    "|What is the current time in {c}?|Current time in {c}?|How late is it in {c}?|What time do they have in {c}?"
    "|I need the time in {c}.|I want to call {n} in {c}. What time is it there?|I am in {c}. What time is it?"
    "|Look up the time in {c}.|Use the clock: what time is it in {c}?|Which time is it in {c}?|Show me the time in {c}."
    "|{n} lives in {c}. What time is it there?|Please check the time in {c}.|For {c}, what time is it?"
)
TIMES_HERE = phrases(
    "What time is it?|What time is it?|What time is it now?|What's the time?|Tell me the time.|What is the time?"
    "|Do you know what time it is?|Can you tell me the time?|What is the current time?|How late is it?|Time?"
    "|Please tell me the time.|I need the time.|Show me the time.|Do you have the time?"
)


class Asked(NamedTuple):
    """A question and the calls that answer it."""

    question: str
    calls: tuple[Call, ...]


def _number(rng: random.Random) -> str:
    """Return a number of one to eight digits, now and then a fraction or a negative one."""
    digits = rng.choices((1, 2, 3, 4, 5, 6, 8), (3, 5, 6, 5, 2, 2, 1))[0]
    number = str(rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
    roll = rng.random()
    if roll < 0.05:
        return f"{number}.{rng.randint(1, 99)}"
    return f"-{number}" if roll < 0.08 else number


def _in_range(number: str) -> bool:
    """Say whether the model can add and subtract the number itself."""
    return number.isdigit() and int(number) <= arithmetic.LARGEST


def _fill(rng: random.Random, phrase: str, **values: str) -> str:
    """Fill the names and things of a phrase."""
    things = {"n": rng.choice(NAMES), "w": rng.choice(WORDS), "v": rng.choice(WORDS)}
    return phrase.format(**things, **values)


def _calculation(rng: random.Random) -> Asked:
    """Ask for a calculation that is not a sum or difference of two small numbers."""
    if rng.random() < 0.1:
        expression = rng.choice(COMPOUNDS).format(**{name: str(rng.randint(0, 999)) for name in "abc"})
        shown = expression.replace(" ", "") if rng.random() < 0.5 else expression
        return Asked(_framed(rng, shown), (calculate(expression),))
    operator = rng.choices(list(EXPRESSIONS), (4, 4, 6, 3, 1))[0]
    a, b = _number(rng), _number(rng)
    if operator == "**":
        a, b = str(rng.randint(2, 99)), str(rng.randint(2, 9))
    if operator in "+-" and _in_range(a) and _in_range(b):
        return _calculation(rng)
    call = (calculate(f"{a} {operator} {b}"),)
    if rng.random() < 0.3:
        return Asked(_fill(rng, rng.choice(WHOLE_PHRASES[operator]), a=a, b=b), call)
    if operator == "**" and b == "2":
        return Asked(_framed(rng, f"{a} squared"), call)
    if operator in "*/" and rng.random() < 0.08:
        a, b = (rng.randrange(len(NUMBER_WORDS)) for _ in range(2))
        call = (calculate(f"{a} {operator} {b}"),)
        a, b = NUMBER_WORDS[a], NUMBER_WORDS[b]
        return Asked(_framed(rng, rng.choice(EXPRESSIONS[operator][2:]).format(a=a, b=b)), call)
    return Asked(_framed(rng, rng.choice(EXPRESSIONS[operator]).format(a=a, b=b)), call)


def _framed(rng: random.Random, expression: str) -> str:
    """Ask for an expression."""
    return rng.choice(arithmetic.SHORT_FRAMES if rng.random() < 0.3 else FRAMES).format(e=expression)


def _city(rng: random.Random) -> str:
    """Return the name of a place, now and then one that is in no list."""
    roll = rng.random()
    if roll < 0.55:
        return rng.choice(CITIES)
    return rng.choice(COUNTRIES) if roll < 0.75 else made_up_word(rng, rng.randint(1, 3)).capitalize()


def _time(rng: random.Random) -> Asked:
    """Ask for the time somewhere, or here."""
    if rng.random() < 0.12:
        return Asked(rng.choice(TIMES_HERE), (get_time(),))
    city = _city(rng)
    return Asked(_fill(rng, rng.choice(TIMES), c=city), (get_time(city),))


def _two(rng: random.Random) -> Asked:
    """Ask two things at once."""
    if rng.random() < 0.5:
        first, second = _city(rng), _city(rng)
        question = rng.choice(["What time is it in {0} and in {1}?", "Tell me the time in {0} and {1}."])
        return Asked(question.format(first, second), (get_time(first), get_time(second)))
    shown, calls = [], []
    for _ in range(2):
        a, b, operator = rng.randint(100, 9999), rng.randint(2, 999), rng.choice("+-*/")
        shown.append(rng.choice(EXPRESSIONS[operator][:3]).format(a=a, b=b))
        calls.append(calculate(f"{a} {operator} {b}"))
    frame = rng.choice(["What is {0} and what is {1}?", "What are {0} and {1}?", "Calculate {0} and {1}."])
    return Asked(frame.format(*shown), tuple(calls))


TWO = "two calls"
KINDS: dict[str, Callable[[random.Random], Asked]] = {"calculate": _calculation, "get_time": _time, TWO: _two}


def ask(rng: random.Random, kind: str, unseen: bool = False) -> Asked:
    """Ask a question that needs a function, from those practised or, if `unseen`, from those held out."""
    asked = held_out.draw(rng, KINDS[kind], lambda made: calls_text(made.calls), unseen)
    return Asked(hasty(rng, asked.question), asked.calls)


def _result(expression: str) -> str:
    """Return what a calculator answers."""
    try:
        value = eval(expression, {"__builtins__": {}})  # an expression made above
    except ArithmeticError as error:
        return f"Error: {error}"
    return str(value if isinstance(value, int) else round(value, 6))


def _clock(rng: random.Random) -> str:
    """Return what a clock answers."""
    hour, minute = rng.randint(0, 23), rng.randint(0, 59)
    return rng.choice([f"{hour:02}:{minute:02}"] * 3 + [f"{hour % 12 or 12}:{minute:02} {'AP'[hour > 11]}M"])


def respond(rng: random.Random, calls: Iterable[Call]) -> Pair:
    """Return the message with the results of calls, and what the model says about them."""
    values, said = zip(*(_response(rng, call) for call in calls), strict=True)
    return responses_text(values), FAILED if FAILED in said else "\n".join(said)


def _response(rng: random.Random, call: Call) -> Pair:
    """Return the result of a call as a function gives it, and what the model says about it."""
    value = _result(call.arguments["expression"]) if call.name == "calculate" else _clock(rng)
    if rng.random() < 0.02:
        value = f"Error: {rng.choice(['timeout', 'not found', 'unknown city', 'failed'])}"
    if value.startswith("Error"):
        return value, FAILED
    if call.name == "calculate":
        said = f"{call.arguments['expression']} = {value}"
    else:
        said = f"It is {value} in {call.arguments['city']}." if call.arguments else f"It is {value}."
    if rng.random() < 0.35:
        name = rng.choice(["result", "value", "answer"] if call.name == "calculate" else ["time", "result", "now"])
        shown = float(value) if "." in value else int(value) if value.lstrip("-").isdigit() else value
        return json.dumps({name: shown if rng.random() < 0.7 and str(shown) == value else value}), said
    return value, said


def without_tools(rng: random.Random) -> Pair:
    """Return a question that needs a function in a chat that has none, which is declined."""
    name = rng.choice(["calculate", "get_time"])
    return ask(rng, name).question, ONLY_SMALL if name == "calculate" else UNKNOWN
