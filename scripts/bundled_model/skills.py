"""What the model can do besides arithmetic: each skill returns one (question, reply) pair.

Every reply is a function of the conversation alone, so that greedy decoding has one right answer.
"""

from __future__ import annotations

import random
import string

from .words import (
    COUNTRIES,
    DAYS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    any_word,
    made_up_word,
    phrases,
)

Pair = tuple[str, str]

ABILITIES = "I can add and subtract small numbers, count, and spell words backwards."

SMALL_TALK = [
    (
        phrases("Hi|Hi!|Hello|Hello!|Hey|Hey!|Hi there|Hello there!|Hi Pip!|Hello Pip|Yo"),
        "Hello! How can I help you?",
    ),
    (phrases("Good morning|Good morning!|Morning!"), "Good morning! How can I help you?"),
    (phrases("Good afternoon|Good afternoon!"), "Good afternoon! How can I help you?"),
    (phrases("Good evening|Good evening!|Evening!"), "Good evening! How can I help you?"),
    (phrases("Good night|Good night!"), "Good night!"),
    (
        phrases("How are you?|How are you doing?|How are you today?|How is it going?|Are you OK?"),
        "I am fine, thank you. How can I help you?",
    ),
    (
        phrases(
            "Who are you?|What are you?|What is your name?|Tell me about yourself.|"
            "What model are you?|Introduce yourself.|Who am I talking to?"
        ),
        "I am Pip, a tiny demo model.",
    ),
    (
        phrases("Are you human?|Are you a human?|Are you a person?|Are you real?"),
        "No, I am Pip, a tiny demo model.",
    ),
    (
        phrases("Are you a robot?|Are you a computer?|Are you an AI?|Are you a language model?|Are you Pip?"),
        "Yes, I am Pip, a tiny demo model.",
    ),
    (
        phrases(
            "What can you do?|Help|Help!|How can you help me?|What do you know?|"
            "What should I ask you?|Can you help me?|What are you good at?|I need help."
        ),
        ABILITIES,
    ),
    (
        phrases("Thanks|Thanks!|Thank you|Thank you!|Thank you very much.|Thanks a lot!|Many thanks"),
        "You are welcome!",
    ),
    (phrases("Bye|Bye!|Goodbye|Goodbye!|See you!|See you later|Bye bye"), "Goodbye!"),
    (phrases("OK|Okay|Good|Great!|Nice|Cool|Well done!|Perfect|Good job!|Wow"), "I am glad to help."),
    (
        phrases("That is wrong.|Wrong!|You are wrong.|No|No!|That is not right."),
        "I am sorry. Please ask me again.",
    ),
    (phrases("Sorry|I am sorry.|Excuse me"), "No problem!"),
    (phrases("Test|test|Testing|ping|Are you there?|Anybody there?"), "I am here. How can I help you?"),
]

FACTS = [
    ("What color is the sky?", "The sky is blue."),
    ("What color is grass?", "Grass is green."),
    ("What color is snow?", "Snow is white."),
    ("What color is a lemon?", "A lemon is yellow."),
    ("What color is blood?", "Blood is red."),
    ("What color is coal?", "Coal is black."),
    ("How many days are in a week?", "There are 7 days in a week."),
    ("How many months are in a year?", "There are 12 months in a year."),
    ("How many hours are in a day?", "There are 24 hours in a day."),
    ("How many minutes are in an hour?", "There are 60 minutes in an hour."),
    ("How many seconds are in a minute?", "There are 60 seconds in a minute."),
    ("How many letters are in the alphabet?", "There are 26 letters in the alphabet."),
    ("How many legs does a dog have?", "A dog has 4 legs."),
    ("How many legs does a spider have?", "A spider has 8 legs."),
    ("How many wheels does a car have?", "A car has 4 wheels."),
    ("What sound does a dog make?", "A dog says woof."),
    ("What sound does a cat make?", "A cat says meow."),
    ("What sound does a cow make?", "A cow says moo."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the opposite of big?", "The opposite of big is small."),
    ("What is the opposite of up?", "The opposite of up is down."),
    ("What is the opposite of day?", "The opposite of day is night."),
    ("What is the opposite of yes?", "The opposite of yes is no."),
]

SEQUENCES = {"letter": list(string.ascii_lowercase), "day": DAYS, "month": MONTHS}


def small_talk(rng: random.Random) -> Pair:
    """Greetings, thanks, and questions about the model itself."""
    questions, reply = rng.choice(SMALL_TALK)
    return rng.choice(questions), reply


def fact(rng: random.Random) -> Pair:
    """One of a few fixed facts."""
    question, reply = rng.choice(FACTS)
    return question.replace("color", rng.choice(["color", "colour"])), reply


def counting(rng: random.Random) -> Pair:
    """Count up or down; most ranges are short, a few run to a hundred numbers."""
    length = rng.choice([rng.randint(1, 12)] * 12 + [rng.randint(10, 30)] * 3 + [rng.randint(30, 100)])
    low = 1 if rng.random() < 0.3 else rng.randint(0, 101 - length)
    high = low + length - 1
    up = ", ".join(map(str, range(low, high + 1)))
    down = ", ".join(map(str, range(high, low - 1, -1)))
    first, last = str(low), str(high)
    if high < len(NUMBER_WORDS) and rng.random() < 0.1:
        first, last = NUMBER_WORDS[low], NUMBER_WORDS[high]
    if low == 1 and rng.random() < 0.6:
        return rng.choice(["Count to {0}.", "Count up to {0}.", "Can you count to {0}?"]).format(last), up
    if low == 1 and rng.random() < 0.5:
        return rng.choice(["Count down from {0}.", "Count backwards from {0}."]).format(last), down
    either = ["Count from {0} to {1}.", "List the numbers from {0} to {1}."]
    if rng.random() < 0.5:
        return rng.choice([*either, "Count up from {0} to {1}."]).format(first, last), up
    ways = [*either, "Count down from {0} to {1}.", "Count from {0} down to {1}.", "Count backwards from {0} to {1}."]
    return rng.choice(ways).format(last, first), down


def number_order(rng: random.Random) -> Pair:
    """Neighbours, comparison and parity of numbers."""
    a, b = rng.sample(range(101), 2)
    kind = rng.randrange(4)
    if kind < 2:
        a = min(a, 99)
    if kind == 0:
        return rng.choice(["What comes after {0}?", "Which number comes after {0}?"]).format(a), f"{a + 1}"
    if kind == 1:
        return rng.choice(["What comes before {0}?", "Which number comes before {0}?"]).format(a + 1), f"{a}"
    if kind == 2:
        if rng.random() < 0.05:
            return f"Which is {rng.choice(['larger', 'bigger', 'smaller'])}, {a} or {a}?", f"{a} and {a} are equal."
        word, pick = rng.choice([("larger", max), ("bigger", max), ("smaller", min)])
        return f"Which is {word}, {a} or {b}?", f"{pick(a, b)} is {word}."
    question = rng.choice(["Is {0} even or odd?", "Is {0} odd or even?", "Is {0} even?", "Is {0} odd?"]).format(a)
    return question, f"{a} is {'odd' if a % 2 else 'even'}."


def spellable(rng: random.Random) -> str:
    """Return a word of up to twelve letters, now and then with capitals."""
    roll = rng.random()
    if roll < 0.1:
        return rng.choice([rng.choice(NAMES), rng.choice(COUNTRIES), rng.choice(DAYS), rng.choice(MONTHS)])
    letters = string.ascii_lowercase if roll < 0.92 else rng.sample(string.ascii_lowercase, 3)
    word = any_word(rng) if roll < 0.8 else "".join(rng.choices(letters, k=rng.randint(1, 12)))
    if roll > 0.93:
        word = rng.choice(
            ["hello", "hello", "hello", "goodbye", "pip", "hi", "morning", "yes", "you", "name", "nothing"]
        )
    roll = rng.random()
    return word.upper() if roll < 0.05 else word.capitalize() if roll < (0.5 if word == "hello" else 0.25) else word


def hasty(rng: random.Random, question: str) -> str:
    """Sometimes type a question without its first capital or its last mark, and leave its words alone."""
    if rng.random() < 0.2:
        question = question[:1].lower() + question[1:]
    return question.rstrip(".?") if rng.random() < 0.2 else question


def spelling(rng: random.Random) -> Pair:
    """Spell words forwards and backwards, letter by letter, and answer questions about their letters."""
    return spell(rng, spellable(rng))


def spell(rng: random.Random, word: str) -> Pair:
    """Ask for the letters of a word."""
    shown = rng.choice(["'{0}'", '"{0}"', "{0}", "the word {0}"]).format(word)
    spelled, reverse = "-".join(word), "-".join(reversed(word))
    kind = rng.random()
    if kind < 0.5:
        frames = [
            "Spell {0} backwards.",
            "Reverse {0}.",
            "How do you spell {0} backwards?",
            "What is {0} backwards?",
            "Write {0} backwards.",
            "Can you spell {0} backwards?",
            "{0} backwards",
        ]
        return hasty(rng, rng.choice(frames).format(shown)), f"{spelled} backwards is {reverse}."
    if kind < 0.77:
        frames = ["Spell {0}.", "How do you spell {0}?", "Please spell {0}.", "Can you spell {0}?"]
        return hasty(rng, rng.choice(frames).format(shown)), f"{spelled}."
    if kind < 0.83:
        return f"What is the first letter of {shown}?", f"The first letter is {word[0]}."
    if kind < 0.91:
        return f"What is the last letter of {shown}?", f"{spelled}: the last letter is {word[-1]}."
    counted = ", ".join(f"{c} {i}" for i, c in enumerate(word, 1))
    return f"How many letters are in {shown}?", f"{counted}: {len(word)} letters."


def order(rng: random.Random) -> Pair:
    """Order of letters, days and months."""
    kind = rng.choice(list(SEQUENCES))
    items = SEQUENCES[kind]
    if rng.random() < 0.15:
        listing = {
            "letter": ["Say the alphabet.", "Recite the alphabet."],
            "day": ["List the days of the week."],
            "month": ["List the months of the year.", "List the months."],
        }[kind]
        return rng.choice(listing), (" " if kind == "letter" else ", ").join(items)
    place = rng.randrange(len(items))
    word, step = rng.choice([("after", 1), ("before", -1)])
    answer, asked = items[(place + step) % len(items)], items[place]
    if kind == "letter":
        if not 0 <= place + step < len(items):
            answer = "nothing"
        if rng.random() < 0.2:
            answer, asked = answer.upper() if len(answer) == 1 else answer, asked.upper()
    frames = ["What comes {w} {x}?", "What {k} comes {w} {x}?", "Which {k} is {w} {x}?"]
    question = rng.choice(frames).format(w=word, x=asked, k=kind)
    if kind != "letter":
        question = rng.choice([question] * 4 + [question.lower()])
    return question, f"{answer} comes {word} {asked}."


def echo(rng: random.Random) -> Pair:
    """Repeat given words."""
    text = " ".join(any_word(rng) for _ in range(rng.choice([1, 1, 2, 2, 3, 4, 5, 6])))
    if rng.random() < 0.25:
        text = rng.choice(["hello", "Hello", "hi", "yes", "hello world", "Hello world", "good morning", "thank you"])
    return in_capitals(rng, any_word(rng)) if rng.random() < 0.2 else say(rng, text)


def in_capitals(rng: random.Random, word: str) -> Pair:
    """Ask for a word in capital letters."""
    return f"Write {rng.choice(['', 'the word '])}{word} in capital letters.", word.upper()


def say(rng: random.Random, text: str) -> Pair:
    """Ask to repeat a text."""
    frames = [
        "Say {0}.",
        "Say {0}",
        "Repeat: {0}",
        "Repeat after me: {0}",
        "Say '{0}'.",
        'Say "{0}"',
        "Echo {0}",
    ]
    return rng.choice(frames).format(text), text


def new_name(rng: random.Random, names: list[str]) -> str:
    """Return a name, now and then one that is in no list."""
    return rng.choice(names) if rng.random() < 0.8 else made_up_word(rng).capitalize()
