"""docs/api.md: its examples run, and its tables have every field."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatoken import Completion, Request, TokenEvent

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^## (.+?)$|^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_examples_run_in_the_order_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "api"}
    title, shown = "", {}
    for heading, code in EXAMPLES:
        title = heading or title
        if code:
            exec(compile(code, f"docs/api.md, {title or 'beginning'}", "exec"), names)
            shown[title] = capsys.readouterr().out
    assert "stop" in shown[""] or "length" in shown[""]
    assert shown["Chats"] == "apple, fig, pear, plum\n"
    assert re.search(r'\{\s*"colour"\s*:\s*"(red|blue)"', shown["Grammars"])
    assert re.search(r"^[0-9]{2}-[a-z]{3}$", shown["Grammars"], flags=re.MULTILINE)
    assert len(shown["Logprobs"].splitlines()) <= 5 and shown["Logprobs"]
    assert shown["Event loops"] and shown["Threads"]
    assert "temperature is -1; it must be finite and not negative" in shown["Errors"]


def test_the_tables_have_every_field() -> None:
    table = PAGE.partition("## Requests, events and completions")[2]
    names = {field.name for kind in (Request, Completion) for field in fields(kind)} | set(TokenEvent._fields)
    assert {name for name in names if f"| `{name}` |" not in table} == set()
