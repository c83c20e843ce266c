"""Chat templates: equal to transformers' rendering, and hostile ones that can neither escape, hang nor eat memory."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatoken.errors import CheckpointError, UsageError
from megatoken.serve import chat_template
from megatoken.serve.chat_template import DEADLINE_SECONDS, MOST_WAITING, ModelTemplates, TemplateRenderer, _exchange
from megatoken.serve.json_pipe import framed
from megatoken.serve.request_errors import ApiError
from megatoken.serve.tenant_turns import TenantTurns

# Templates in the styles that checkpoints bring, written for this test.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" + (tool | tojson) }}
    {%- endfor %}
    {{- '\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}{{ message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- set ns = namespace(system='You are helpful.') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n' }}
{{- ns.system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
INST = """\
{% if messages[0]['role'] == 'system' %}
    {% set system = messages[0]['content'] %}
    {% set loop_messages = messages[1:] %}
{% else %}
    {% set system = '' %}
    {% set loop_messages = messages %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate user, assistant, user, ...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + (system + '\\n' if loop.first and system else '') }}
        {{- message['content'] + ' [/INST]' }}
    {% else %}
        {% generation %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": 'Größe < 5 & "naïve" 東京\u2028 {{ 7 * 7 }}'}],
    "turns": [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two \n"},
        {"role": "user", "content": "three", "name": "Ann"},
    ],
    "tools": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
        },
        {"role": "tool", "content": "sunny"},
    ],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def write_model(folder: Path, template: Any) -> ModelTemplates:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **TOKENS, "pad_token": None}))
    return ModelTemplates(folder)


def rendered(templates: ModelTemplates, *jobs: tuple[str, dict[str, Any]], max_length: int = 4096) -> list[Any]:
    """The prompt of each job, or the error in its place; all by one renderer."""

    async def render_all() -> list[Any]:
        renderer = TemplateRenderer(templates, max_length)
        answers: list[Any] = []
        try:
            for template, chat in jobs:
                try:
                    answers.append(await renderer.render(template, chat))
                except ApiError as error:
                    answers.append(error)
        finally:
            await renderer.close()
        return answers

    return asyncio.run(render_all())


@pytest.mark.parametrize("style", TEMPLATES)
def test_prompts_equal_those_of_transformers(style: str, tmp_path: Path) -> None:
    templates = write_model(tmp_path, TEMPLATES[style])
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    theirs.chat_template = TEMPLATES[style]
    jobs, expected = [], []
    for name, messages in CHATS.items():
        if name == "tools" and style != "chatml":
            continue
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": True, "enable_thinking": False},
            {"add_generation_prompt": False, "continue_final_message": True},
        ):
            tools = [TOOL] if name == "tools" else None
            jobs.append(("default", {"messages": messages, "tools": tools, **options}))
            expected.append(theirs.apply_chat_template(messages, tools=tools, tokenize=False, **options))
    for ours, theirs_text in zip(rendered(templates, *json.loads(json.dumps(jobs))), expected, strict=True):
        assert str(ours) == theirs_text
    if style == "headers":
        assert datetime.now().strftime("%Y") in expected[0]


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert ModelTemplates(tmp_path).by_name == {}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    templates = write_model(tmp_path, named)
    assert templates.by_name == {"default": "d", "tool_use": "t"}
    assert templates.tokens == TOKENS
    assert (templates.choose(tools=False), templates.choose(tools=True)) == ("default", "tool_use")
    (tmp_path / "chat_template.jinja").write_text("j")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("r")
    assert ModelTemplates(tmp_path).by_name == {"default": "j", "tool_use": "t", "rag": "r"}
    (tmp_path / "mine").write_text("m")
    assert ModelTemplates(tmp_path, tmp_path / "mine").by_name == {"default": "m"}
    with pytest.raises(UsageError, match=r"--chat-template .*missing: cannot be read"):
        ModelTemplates(tmp_path, tmp_path / "missing")
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: damaged JSON"):
        ModelTemplates(tmp_path)


def test_a_model_without_a_default_template(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="has no chat template; start the server with --chat-template FILE"):
        ModelTemplates(None).choose(tools=False)
    with pytest.raises(ApiError, match="it has rag and no default"):
        write_model(tmp_path, {"rag": "r"}).choose(tools=True)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
HOSTILE = {
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe|undefined",
    "{{ messages.__init__.__globals__.os }}": "unsafe|undefined",
    "{{ raise_exception.__globals__.os }}": "unsafe|undefined",
    "{{ namespace.__init__.__globals__.os }}": "unsafe|undefined",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}": "underscore",
    "{{ cycler.__init__.__globals__.os.system('id') }}": "unsafe|undefined",
    "{{ messages.append(1) }}": "unsafe|not safe",
    "{% for a in range(10**9) %}x{% endfor %}": "Range too big|did not end",
    "{{ 'x' * (10 ** 10) }}": "memory",
    "{{ raise_exception('only text') }}": "only text",
    "{% if %}": "line 1",
    "{{ 1 // 0 }}": "division|modulo",
    "{{ 'x' * 10**6 }}": "more than the",
}


@pytest.mark.parametrize("template", HOSTILE)
def test_hostile_templates_get_an_error(template: str, tmp_path: Path) -> None:
    (error, after) = rendered(write_model(tmp_path, CHATML), (template, CHAT), ("default", CHAT))
    assert isinstance(error, ApiError) and error.status == 400
    assert any(one in str(error) for one in HOSTILE[template].split("|")), str(error)
    assert str(after).startswith("<|im_start|>user\nhello")


@pytest.mark.timing
def test_a_template_that_hangs_is_killed_while_the_loop_runs(tmp_path: Path) -> None:
    nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    templates = write_model(tmp_path, CHATML)

    async def watch() -> tuple[float, float, Any, str]:
        renderer = TemplateRenderer(templates, 4096)
        await renderer.render("default", CHAT)
        began, longest = time.monotonic(), 0.0
        hanging = asyncio.ensure_future(renderer.render(nested, CHAT))
        while not hanging.done():
            turn = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - turn)
        took = time.monotonic() - began
        text = await renderer.render("default", CHAT)
        await renderer.close()
        return took, longest, hanging.exception(), text

    took, longest, error, text = asyncio.run(watch())
    assert "did not end within 1 s" in str(error)
    assert took < DEADLINE_SECONDS + 4
    assert longest < 0.9  # far below the deadline, on a busy machine
    assert text.startswith("<|im_start|>user\nhello")


def test_a_client_that_leaves_does_not_disturb_the_next_one(tmp_path: Path) -> None:
    templates = write_model(tmp_path, CHATML)

    async def leave() -> str:
        renderer = TemplateRenderer(templates, 4096)
        first = asyncio.ensure_future(renderer.render("first", CHAT))
        await asyncio.sleep(0)
        first.cancel()
        text = await renderer.render("second", CHAT)
        await renderer.close()
        return text

    assert asyncio.run(leave()) == "second"


def test_a_process_that_starts_too_late_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = write_model(tmp_path, CHATML)

    async def late() -> str:
        renderer = TemplateRenderer(templates, 4096)
        with monkeypatch.context() as patch:
            patch.setattr(chat_template, "START_SECONDS", 0.0)
            await renderer.start()
        text = await renderer.render("second", CHAT)
        await renderer.close()
        return text

    assert asyncio.run(late()) == "second"


def test_no_way_to_continue_a_message_that_is_left_out(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "assistant", "content": "half"}], "continue_final_message": True}
    (error,) = rendered(write_model(tmp_path, "nothing"), ("default", chat))
    assert "leaves out the final message" in str(error)


def test_a_chat_that_the_process_has_no_memory_for(tmp_path: Path) -> None:
    many = {"messages": [{"role": "user", "content": ""}] * 10, "deep": [[{}] * 10] * 400_000}
    templates = write_model(tmp_path, CHATML)
    first, after = rendered(templates, ("default", many), ("default", CHAT), max_length=1 << 20)
    assert isinstance(first, ApiError) and first.status == 400
    assert str(after).startswith("<|im_start|>user\nhello")


def test_the_whole_chat_is_bounded(tmp_path: Path) -> None:
    large = [{**CHAT, "tools": [{"text": "x" * 70_000}]}, {**CHAT, "deep": [[]] * 40_000}]
    *errors, after = rendered(
        write_model(tmp_path, CHATML), *(("default", chat) for chat in (*large, CHAT)), max_length=1024
    )
    for error in errors:
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert "more than the 65,536 characters that can ever fit" in str(error)
    assert str(after).startswith("<|im_start|>user\nhello")


@pytest.mark.timing
def test_chats_wait_in_a_bounded_queue_and_only_for_clients_that_stay(tmp_path: Path) -> None:
    templates = write_model(tmp_path, CHATML)
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

    async def wait() -> None:
        renderer = TemplateRenderer(templates, 4096)
        await renderer.render("default", CHAT)
        hanging = [asyncio.ensure_future(renderer.render(slow, CHAT)) for _ in range(MOST_WAITING + 1)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="send the request again") as refused:
            await renderer.render("default", CHAT)
        assert (refused.value.status, refused.value.retry_after) == (429, 1)
        for one in hanging[1:]:
            one.cancel()
        await asyncio.sleep(0)
        began = time.monotonic()
        assert (await renderer.render("default", CHAT)).startswith("<|im_start|>user\nhello")
        assert time.monotonic() - began < 20 * DEADLINE_SECONDS  # of the 65 seconds that all would have taken
        await asyncio.gather(*hanging, return_exceptions=True)
        await renderer.close()

    asyncio.run(wait())


def test_the_chats_of_one_tenant_do_not_hold_up_those_of_another(tmp_path: Path) -> None:
    """Each of the others waits for one chat of the tenant that floods, and a full queue is full for that one alone."""
    templates = write_model(tmp_path, CHATML)

    async def order() -> list[str]:
        renderer = TemplateRenderer(templates, 4096)
        ended: list[str] = []

        async def render(tenant: str) -> None:
            await renderer.render("default", CHAT, tenant)
            ended.append(tenant)

        flood = [asyncio.ensure_future(render("flood")) for _ in range(MOST_WAITING + 1)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="send the request again"):
            await render("flood")
        others = [asyncio.ensure_future(render(tenant)) for tenant in ("one", "two", "one")]
        await asyncio.sleep(0)
        flood[3].cancel()
        await asyncio.gather(*others, *flood, return_exceptions=True)
        await renderer.close()
        return ended

    ended = asyncio.run(order())
    assert ended[:6] == ["flood", "one", "two", "flood", "one", "flood"] and len(ended) == MOST_WAITING + 3


def test_turns_of_clients_that_leave_pass_to_the_next() -> None:
    async def leave() -> None:
        turns = TenantTurns()
        await turns.acquire("a")
        waiting = [asyncio.ensure_future(turns.acquire(tenant)) for tenant in ("a", "b", "c")]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        turns.release()  # it is c's turn, which leaves before it can take it
        waiting[2].cancel()
        await asyncio.wait_for(waiting[0], 5)
        turns.release()
        await asyncio.wait_for(turns.acquire("b"), 5)

    asyncio.run(leave())


def test_a_template_that_hangs_ends_without_the_process_that_would_kill_it() -> None:
    code = "from megatoken.serve import template_process as one; one.CPU_SECONDS = 1; one.main()"
    hanging = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    messages = [{"templates": {}, "tokens": {}, "largest_text": 100}, {"template": hanging, "chat": {}}]
    given = b"".join(framed(json.dumps(one)) for one in messages)
    ended = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGXCPU


def test_a_renderer_that_is_closed_while_it_starts_is_a_lost_connection() -> None:
    async def closed() -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        with pytest.raises(ConnectionError):
            await _exchange(process, b"job")

    uvloop.run(closed())  # the loop of a server, which raises RuntimeError on such a write
