"""The process that renders chat templates: jinja2's sandbox, under a limit on memory, killed when it takes too long.

It speaks over its standard input and output. The first message brings the model's templates and special tokens; each
further one is a chat with the name or text of its template, answered by the prompt or an error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from math import ceil
from typing import Any, NoReturn
from uuid import uuid4

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatoken.serve.json_pipe import framed, read_message

MEMORY_BYTES = 512 << 20
CPU_SECONDS = 5  # of one chat; only met when the process that would kill this one after a second has been killed itself


class _Generation(Extension):
    """The block ``generation``, which marks the assistant's text for training, shows its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which lead out of the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:
        checked = dict(*args[1:], **values)
        for name in checked:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], checked)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no name that begins with an underscore: {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of checkpoints expect: the conventions of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


class _Dict:
    """``dict`` in a template: it may be called, and has no attributes that lead to the interpreter."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


ENVIRONMENT = _environment()


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    return ENVIRONMENT.from_string(template)


def render(template: str, chat: dict[str, Any]) -> str:
    """The prompt of a chat.

    Args:
        template: text in jinja2.
        chat: names that the template sees; ``continue_final_message`` cuts the prompt at the end of the last message.

    Raises:
        Exception: whatever a template can raise.
    """
    continued = chat.pop("continue_final_message", False)
    mark = f"{uuid4().hex} "
    if continued:
        chat["messages"][-1]["content"] += mark
    text = _compiled(template).render(**chat)
    if not continued:
        return text
    cut = text.rfind(mark.strip())
    if cut < 0:
        raise jinja2.TemplateError("the template leaves out the final message, so it cannot be continued")
    kept = text[:cut]
    return kept if text.startswith(mark, cut) else kept.rstrip()  # without its space the mark was trimmed: so is text


def _answer(settings: dict[str, Any], job: dict[str, Any]) -> dict[str, str]:
    text = render(settings["templates"].get(job["template"], job["template"]), settings["tokens"] | job["chat"])
    if len(text) > settings["largest_text"]:
        largest = settings["largest_text"]
        return {"error": f"the prompt has {len(text):,} characters, more than the {largest:,} that can ever fit"}
    return {"text": text}


def main() -> None:
    """Render chats until the input ends, or the process that reads the answers has gone."""
    try:
        _render_all()
    except BrokenPipeError:
        os._exit(0)  # Python would complain about what it cannot flush


def _render_all() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)  # -1: no limit
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    settings = read_message(given)
    taken.write(framed(json.dumps({"ready": True})))
    taken.flush()
    while (job := read_message(given)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit if most < 0 else min(limit, most), most))
        try:
            answer = _answer(settings, job)
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
        except jinja2.TemplateSyntaxError as error:
            answer = {"error": f"line {error.lineno}: {error.message}"}
        except Exception as error:  # a template can raise anything; it is the template's fault, never the server's
            answer = {"error": f"{error or type(error).__name__}"[:1000]}
        del job
        taken.write(framed(json.dumps(answer)))
        taken.flush()


if __name__ == "__main__":
    main()
