"""Tasks over texts and lists of words."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from reference_model import words
from reference_model.problem import Problem, length, number


def copy_text(rng: Random) -> Problem:
    """Sentences, loose words, serial numbers and figures, of one kind or mixed."""
    pieces: list[Callable[[], str]] = [
        lambda: words.sentence(rng),
        lambda: " ".join(rng.choices(words.ALL, k=9)),
        lambda: words.code(rng),
        lambda: str(number(rng, 6)),
    ]
    count = rng.randint(2, 27)
    kinds = rng.choices(pieces, weights=(5, 2, 1, 1), k=1 if rng.random() < 0.8 else count)
    text = " ".join(kinds[index % len(kinds)]() for index in range(count))
    return Problem(rng.choice(("Repeat the text exactly.", "Copy this text.", "Write the text again.")), text, text)


def replace_word(rng: Random) -> Problem:
    """A text with one place in place of another."""
    old, new = rng.sample(words.PLACES, 2)
    sentences = [words.sentence(rng) for _ in range(rng.randint(2, 18))]
    for index in rng.sample(range(len(sentences)), rng.randint(1, len(sentences) // 2)):
        sentences[index] = f"{rng.choice(words.NAMES)} {rng.choice(words.STAYS)} {rng.choice(words.NEAR)} the {old}."
    text = " ".join(sentences)
    wording = rng.choice(("Write the text with {} in place of {}.", "Copy the text, but write {} instead of {}."))
    return Problem(wording.format(new, old), text, text.replace(f" {old}.", f" {new}."))


def reverse_list(rng: Random) -> Problem:
    """Last to first."""
    items = rng.choices(words.ALL, k=rng.randint(3, 30))
    wording = rng.choice(("Reverse the list.", "Write the list from last to first."))
    return Problem(wording, ", ".join(items), ", ".join(reversed(items)))


def sort_words(rng: Random) -> Problem:
    """From A to Z."""
    items = rng.sample(words.LOWERCASE, length(rng, 3, 12))
    wording = rng.choice(("Sort the words from A to Z.", "Put the words in alphabetical order."))
    return Problem(wording, ", ".join(items), ", ".join(sorted(items)))


def count_word(rng: Random) -> Problem:
    """Occurrences of one word."""
    pool = rng.sample(words.NOUNS, rng.randint(2, 6))
    items = rng.choices(pool, k=length(rng, 4, 32))
    word = rng.choice(pool)
    wording = rng.choice(("How many times does {} occur in the list?", "Count the word {} in the list."))
    return Problem(wording.format(word), ", ".join(items), str(items.count(word)))


def tally(rng: Random) -> Problem:
    """Occurrences of every word."""
    items = rng.choices(rng.sample(words.NOUNS, rng.randint(2, 6)), k=length(rng, 4, 20))
    lines = [f"{item}: {items.count(item)}" for item in dict.fromkeys(items)]
    wording = rng.choice(
        ("Count each word, in order of first appearance.", "How often does each word occur, in order?")
    )
    return Problem(wording, ", ".join(items), "\n".join(lines))


def filter_kind(rng: Random) -> Problem:
    """Only the animals, foods, colours or things."""
    kind = rng.choice(list(words.KINDS))
    items = rng.sample(words.NOUNS, rng.randint(4, 40))
    kept = [item for item in items if item in words.KINDS[kind]]
    wording = rng.choice(("Keep only the {}; if there are none, write none.", "List the {}, or write none."))
    return Problem(wording.format(kind), ", ".join(items), ", ".join(kept) or "none")


def deduplicate(rng: Random) -> Problem:
    """Every word once."""
    count = rng.randint(4, 36)
    items = rng.choices(rng.sample(words.ALL, count * 2 // 3), k=count)
    wording = rng.choice(("Remove the repeated words.", "Write every word once, in order of first appearance."))
    return Problem(wording, ", ".join(items), ", ".join(dict.fromkeys(items)))


def change_case(rng: Random) -> Problem:
    """Capital, small and title letters."""
    text = " ".join(rng.sample(words.LOWERCASE, rng.randint(3, 24)))
    forms = {"in capital letters": text.upper(), "in small letters": text, "with a capital first letter": text.title()}
    given, wanted = rng.sample(list(forms), 2)
    return Problem(f"Write every word {wanted}.", forms[given], forms[wanted])


def spell(rng: Random) -> Problem:
    """Words to letters and back."""
    items = rng.sample(words.LOWERCASE, length(rng, 3, 9))
    letters = "\n".join("-".join(item) for item in items)
    if rng.random() < 0.7:
        return Problem("Spell the words, one a line.", ", ".join(items), letters)
    return Problem("Which words are spelled here?", letters, ", ".join(items))


def pair_lists(rng: Random) -> Problem:
    """The first of one list with the first of the other, and so on."""
    count = length(rng, 2, 24)
    left = rng.choices(words.ALL, k=count)
    right = rng.choices(words.ALL, k=count) if rng.random() < 0.5 else [str(number(rng, 2)) for _ in range(count)]
    pairs = "\n".join(f"{first}: {second}" for first, second in zip(left, right, strict=True))
    return Problem("Pair the two lists, one pair a line.", f"{', '.join(left)}\n{', '.join(right)}", pairs)
