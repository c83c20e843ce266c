"""Questions about a story whose facts are told in any order, with others between that nobody asks about."""

from __future__ import annotations

from random import Random

from reference_model import words
from reference_model.problem import Problem, length


def story(rng: Random) -> Problem:
    """Where somebody or something is (also by two facts), who did something, which colour something has.

    People and things are all different, so that each question has one answer. People move: the last place counts.
    """
    count = length(rng, 2, 16)
    people, things = rng.sample(words.NAMES, count), rng.sample(words.KINDS["things"], count)
    told: list[tuple[float, str]] = []  # the order of a fact, the fact
    questions = []
    for person, thing in zip(people, things, strict=True):
        place = rng.choice(words.PLACES)
        match rng.randrange(4):
            case 0:
                colour = rng.choice(words.KINDS["colours"])
                facts = [f"The {thing} of {person} is {colour}."]
                questions.append((f"Which colour is the {thing} of {person}?", f"The {thing} is {colour}."))
            case 1:
                facts = [f"{person} {rng.choice(words.DEEDS)} the {thing} in the {place}."]
                questions.append((f"Where is the {thing}?", f"The {thing} is in the {place}."))
                questions.append((f"Who was in the {place} with the {thing}?", f"It was {person}."))
            case 2:
                facts = [f"{person} went to the {stop}." for stop in rng.choices(words.PLACES, k=rng.randint(0, 2))]
                facts.append(f"{person} went to the {place}.")
                questions.append((f"Where is {person} now?", f"{person} is in the {place}."))
            case _:
                facts = [f"{person} has the {thing}.", f"{person} is in the {place}."]
                questions.append((f"Where is the {thing}?", f"{person} is in the {place} and has the {thing}."))
        told += zip(sorted(rng.random() for _ in facts), facts, strict=True)
    told += [(rng.random(), words.weather(rng)) for _ in range(rng.randint(0, count))]
    question, answer = rng.choice(questions)
    return Problem(question, " ".join(fact for _, fact in sorted(told)), answer)
