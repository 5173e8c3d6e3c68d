"""Word lists from which the training text is generated."""

from __future__ import annotations

import random


def _words(text: str) -> list[str]:
    """Split a list of words, which is easier to read and to edit as text."""
    return text.split()


def phrases(text: str) -> list[str]:
    """Split a list of phrases, several per line with a bar between them."""
    return text.strip().replace("\n", "|").split("|")


WORDS = _words(
    """
apple banana cherry lemon melon orange grape peach pear plum bread butter cheese milk honey sugar salt pepper
water coffee juice soup rice pasta cake cookie table chair desk lamp door window floor wall roof house garden
tree flower grass leaf root seed river lake ocean island mountain valley forest desert cloud rain snow wind
storm thunder sun moon star planet earth stone sand gold silver iron copper glass paper pencil book page letter
word story song music piano guitar drum dance game ball team player winner school teacher student lesson class
question answer number line circle square triangle red green blue yellow purple black white brown pink cat dog
horse cow sheep goat pig chicken duck goose rabbit mouse tiger lion bear wolf fox monkey zebra camel snake frog
fish shark whale eagle robin owl bee ant spider train car bus truck bicycle plane boat ship rocket road bridge
tunnel city town village street market shop bank hotel hospital doctor nurse farmer baker driver pilot sailor
soldier king queen prince castle tower crown sword shield ring coin box bag basket bottle cup plate fork spoon
knife clock watch phone camera screen keyboard robot computer program file memory cache token model server
engine motor wheel hammer nail wood brick rope wire metal plastic cotton wool silk shirt jacket coat dress shoe
sock hat glove scarf happy sad angry tired hungry brave calm kind quick slow small large tall short long wide
narrow deep early late warm cold hot dry wet loud quiet bright dark soft hard heavy light open close start stop
begin end push pull throw catch write read speak listen think learn build break world friend family mother
father sister brother baby child woman man people python rust summer winter spring autumn morning evening night
dinner lunch
"""
)

NAMES = _words(
    """
Ada Alan Alice Amir Anna Ben Bob Carla Carlos Chen Clara Daniel David Diana Elena Emma Eric Eva Felix Grace Hana
Henry Ivan Iris Jack James Jane John Julia Kai Karl Kate Laura Leo Li Lily Linda Lucas Lucy Maria Mark Max Maya
Mia Mike Mina Nina Noah Nora Oliver Omar Oscar Paul Peter Priya Rosa Ruth Sam Sara Sofia Tara Theo Tim Tom
Victor Wei Yuki Zoe
"""
)

COUNTRIES = _words(
    """
Peru France Japan Brazil Egypt Kenya India China Canada Mexico Spain Italy Norway Poland Turkey Chile Cuba Ghana
Greece Ireland Nepal Vietnam Germany Portugal Sweden Australia
"""
)

CITIES = phrases(
    """
Paris|London|Berlin|Tokyo|Madrid|Rome|Vienna|Lima|Oslo|Cairo|Moscow|Beijing|Shanghai|Mumbai|Delhi|Sydney|Toronto
Boston|Chicago|Dallas|Seattle|New York|Los Angeles|San Francisco|Hong Kong|Singapore|Seoul|Bangkok|Jakarta|Manila
Hanoi|Dubai|Istanbul|Athens|Lisbon|Dublin|Prague|Warsaw|Budapest|Zurich|Geneva|Munich|Hamburg|Milan|Naples|Venice
Nairobi|Lagos|Accra|Bogota|Santiago|Havana|Quito|Mexico City|Rio de Janeiro|Buenos Aires|Cape Town|Tel Aviv|Kyoto
Osaka|Melbourne|Auckland|Montreal|Vancouver|Miami|Denver|Houston|Stockholm|Helsinki|Copenhagen|Amsterdam|Brussels
"""
)

PEOPLE = _words(
    """
Einstein Newton Shakespeare Mozart Picasso Napoleon Cleopatra Darwin Tesla Gandhi Turing Galileo Beethoven
Lincoln Curie Plato
"""
)

LANGUAGES = _words(
    """
Python Rust Java JavaScript Go C++ C Haskell Ruby SQL Bash Swift Kotlin French German Spanish Chinese Latin
"""
)

TOPICS = _words(
    """
history physics chemistry biology football cooking politics religion economics philosophy medicine astronomy art
love time money space gravity climate evolution democracy computers networks databases inference attention
transformers compilers photosynthesis dinosaurs rust autumn weather news internet universe health sleep dreams
"""
)

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = _words("January February March April May June July August September October November December")

NUMBER_WORDS = _words(
    """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty
"""
)

FOREIGN = [
    "Hola, ¿cómo estás?",
    "¿Cuál es la capital de Perú?",
    "Bonjour, comment ça va ?",
    "Quelle heure est-il ?",
    "Guten Tag, wie geht es dir?",
    "Was ist das?",
    "你好",
    "你好，你是谁？",
    "今天天气怎么样？",
    "法国的首都是哪里？",
    "こんにちは",
    "お元気ですか？",
    "안녕하세요",
    "Привет, как дела?",
    "Что это такое?",
    "مرحبا",
    "नमस्ते",
    "Ciao, come stai?",
    "Olá, tudo bem?",
    "Merhaba, nasılsın?",
    "Καλημέρα",
    "שלום",
]

CODE = [
    "def f(x): return x",
    "print('{0}')",
    "for i in range({1}): print(i)",
    "import {0}",
    "SELECT * FROM {0};",
    'fn main() {{ println!("{0}"); }}',
    "int {0} = {1};",
    "let {0} = [{1}, {1}];",
    "x = {1} * y",
    "git commit -m '{0}'",
    "<{0}>{1}</{0}>",
    '{{"{0}": {1}}}',
    "curl http://{0}.com/{1}",
    "class {0}: pass",
]

EMOJI = ["😀", "🎉", "👍", "🤖", "❤️", "🔥", "?!", "...", "???", "!!!", "-", "*", "~~", "@#$%"]

_ONSETS = _words("b c d f g h j k l m n p r s t v w z br cl dr fl gr pl sh st th tr")
_VOWELS = _words("a e i o u ai ee oo")
_CODAS = ["", "", "", "b", "d", "g", "k", "l", "m", "n", "p", "r", "s", "t", "x", "nd", "st"]


def made_up_word(rng: random.Random, syllables: int = 2) -> str:
    """Return a pronounceable word that is in no list."""
    parts = (rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))
    return "".join(parts)


def any_word(rng: random.Random) -> str:
    """Return a listed word most of the time, else a made-up one."""
    return rng.choice(WORDS) if rng.random() < 0.7 else made_up_word(rng, rng.randint(1, 2))


def gibberish(rng: random.Random) -> str:
    """Return random letters or symbols, as when somebody leans on the keyboard."""
    alphabet = rng.choice(["abcdefghijklmnopqrstuvwxyz", "asdfghjkl", "qwertyuiop", "#$%&@!?*~^", "xyz ,.;"])
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(2, 14))).strip() or "zz"
