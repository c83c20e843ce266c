"""The evidence form: questions that no measurement answers, each with yes, no or unknown and the evidence for it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote, urlsplit

from pydantic import Field, model_validator

from megatoken.files import display, open_input
from megatoken.yaml_files import Strict, read_strict, refuse_repeated_ids

SHIPPED = "evidence_form.yaml"
ADDRESSES = ("https://", "http://")

Text = Annotated[str, Field(min_length=1)]


class Item(Strict):
    """One question; ``shows`` says what would show it."""

    id: Text
    group: Text
    question: Text
    shows: Text
    answer: Literal["yes", "no", "unknown"] = "unknown"
    evidence: list[Text] = []
    note: str = ""


class Form(Strict):
    """An evidence form."""

    schema_version: Literal[1] = 1
    title: Text
    items: list[Item] = Field(min_length=1)

    @model_validator(mode="after")
    def _own_names(self) -> Self:
        refuse_repeated_ids([item.id for item in self.items], "items")
        return self


def shipped_form() -> str:
    """The text of the form that ships with the package, in which every answer is unknown."""
    return files("megatoken").joinpath("data", SHIPPED).read_text(encoding="utf-8")


def read_form(path: Path | None, page_folder: Path | None = None) -> dict[str, Any]:
    """A form with its answers as they count, as plain JSON; None: the one that ships with the package.

    An answer counts as yes only with evidence: a web address with a host, or a file other than the form that is there
    and is not empty. Addresses are not fetched. ``page_folder`` is where the page will lie, from which its links lead.

    Raises:
        ConfigError: the file cannot be read or does not fit the schema, with its line.
    """
    if path is None:
        with as_file(files("megatoken") / "data" / SHIPPED) as shipped:
            form, folder = read_strict(shipped, Form), shipped.parent
    else:
        form, folder = read_strict(path, Form), path.absolute().parent
    items = [_scored(item, folder, path, page_folder) for item in form.items]
    return {"title": form.title, "path": str(path) if path else None, "items": items}


def _scored(item: Item, folder: Path, form: Path | None, page_folder: Path | None) -> dict[str, Any]:
    evidence = [_evidence(link, folder, form, page_folder) for link in item.evidence]
    usable = any(not one["problem"] for one in evidence)
    why = ""
    if item.answer != "unknown" and not usable:
        why = "; ".join(_problems(evidence)) or f"answered {item.answer} without evidence"
    counts = "unknown" if item.answer == "yes" and not usable else item.answer
    return {**item.model_dump(), "evidence": evidence, "counts_as": counts, "why": why}


def _problems(evidence: Iterable[dict[str, Any]]) -> list[str]:
    return [f"{one['link']}: {one['problem']}" for one in evidence if one["problem"]]


def _evidence(link: str, folder: Path, form: Path | None, page_folder: Path | None) -> dict[str, Any]:
    """A link with the address that a page uses for it, the SHA-256 of a file, and why it shows nothing, if so."""
    found: dict[str, Any] = {"link": display(link), "address": None, "sha256": None, "problem": ""}
    if link.startswith(ADDRESSES):
        with suppress(ValueError):
            if urlsplit(link).hostname:
                return {**found, "address": link}
        return {**found, "problem": "is no address; give one such as https://example.com/contract"}
    path = folder / link
    try:
        if form and path.samefile(form):
            return {**found, "problem": "is this form; give what shows the answer"}
        with open_input(path) as file:
            found["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
            if not file.tell():
                return {**found, "problem": "is empty"}
    except OSError as error:
        return {**found, "problem": f"cannot be read ({error.strerror})"}
    except ValueError:
        return {**found, "problem": "is no path"}
    return {**found, "address": quote(os.path.relpath(path, (page_folder or Path()).absolute()))}
