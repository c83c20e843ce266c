"""The words of ``words.txt``, and sentences made of them."""

from __future__ import annotations

from pathlib import Path
from random import Random

_PARAGRAPHS = Path(__file__).with_name("words.txt").read_text().split("\n\n")[1:]
_WORDS = {kind: tuple(words.split()) for kind, words in (paragraph.split(":") for paragraph in _PARAGRAPHS)}

NAMES, CITIES, JOBS, PLACES = (_WORDS[kind] for kind in ("names", "cities", "jobs", "places"))
ADJECTIVES, DEEDS, STAYS = (_WORDS[kind] for kind in ("adjectives", "deeds", "stays"))
KINDS = {kind: _WORDS[kind] for kind in ("animals", "foods", "colours", "things")}
NEAR = ("near", "behind", "inside", "in front of", "beside", "under", "above")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

NOUNS = tuple(word for words in KINDS.values() for word in words)
LOWERCASE = (*NOUNS, *PLACES, *JOBS, *ADJECTIVES)
ALL = (*LOWERCASE, *NAMES, *CITIES)

_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_SYMBOLS = _LETTERS + "0123456789"


def code(rng: Random) -> str:
    """A made-up serial number such as ``K7Q-M3``: nothing in it can be guessed, so it must be copied."""
    groups = ("".join(rng.choices(_SYMBOLS, k=rng.randint(2, 4))) for _ in range(rng.randint(1, 3)))
    return rng.choice(_LETTERS) + "-".join(groups)


def weather(rng: Random) -> str:
    """A sentence about a city, which no question is about."""
    city, adjective = rng.choice(CITIES), rng.choice(("cold", "wet", "warm", "calm", "dark", "bright"))
    match rng.randrange(3):
        case 0:
            return f"It was {adjective} in {city}."
        case 1:
            return f"The train to {city} was {rng.randint(2, 59)} minutes late."
    return f"The streets of {city} were {adjective} in {rng.choice(MONTHS)}."


def sentence(rng: Random) -> str:
    """A simple sentence; hundreds of millions are possible."""
    name, other = rng.sample(NAMES, 2)
    adjective, place, city = rng.choice(ADJECTIVES), rng.choice(PLACES), rng.choice(CITIES)
    match rng.randrange(6):
        case 0:
            thing = rng.choice(KINDS["things"])
            return f"{name} {rng.choice(DEEDS)} the {adjective} {thing} {rng.choice(NEAR)} the {place}."
        case 1:
            animal = rng.choice(KINDS["animals"])
            return f"The {adjective} {animal} {rng.choice(STAYS)} {rng.choice(NEAR)} the {place}."
        case 2:
            food, side = rng.sample(KINDS["foods"], 2)
            return f"{name} and {other} ate {food} with {side} in {city}."
        case 3:
            return f"{name} from {city} is a {rng.choice(JOBS)} and {rng.randint(18, 89)} years old."
        case 4:
            thing = rng.choice(KINDS["things"])
            return f"The {rng.choice(KINDS['colours'])} {thing} of {name} cost {rng.randint(2, 999)} coins."
    return (
        f"On {rng.randint(1, 28)} {rng.choice(MONTHS)} {name} met {other} {rng.choice(NEAR)} the {adjective} {place}."
    )
