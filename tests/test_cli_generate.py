import json
import os
import resource
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cli_support import (
    TIMEOUT_SECONDS,
    call,
    call_here,
    make_checkpoint,
    make_overflowing_checkpoint,
    redirected,
    started,
    wait_until_busy,
    write_lines,
)
from examples import every
from megatoken.cli.generate import NOT_A_CHAT
from megatoken.config import AnswerConfig, load_flags, load_run_config
from megatoken.harness.generate import stream_prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def generate(*arguments: object) -> tuple[int, str, str]:
    return call_here("generate", *arguments)


def test_answers_come_in_the_order_of_the_prompts_and_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "hello", "max_tokens": 9},
        {"prompt_token_ids": [3, 1, 4, 1, 5], "max_tokens": 2},
        {"prompt": "a" * 50},
        {"prompt_token_ids": [7], "max_tokens": 30},
    ]
    prompts, out = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    code, stdout, err = generate(
        "--model", model, "--prompts", prompts, "--out", out, "--max-tokens", 5, "--precision", "fp32"
    )
    assert (code, stdout, err) == (0, "", "")
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [set(answer) for answer in answers] == [{"index", "token_ids", "text", "finish_reason"}] * 4
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [len(answer["token_ids"]) for answer in answers] == [9, 2, 5, 30]
    assert {answer["finish_reason"] for answer in answers} == {"length"}

    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    for line, answer in zip(lines, answers, strict=True):
        ids = line.get("prompt_token_ids") or tokenizer(line["prompt"]).input_ids
        tokens = torch.tensor([ids])
        expected = oracle.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=len(answer["token_ids"])
        )
        assert answer["token_ids"] == expected[0, len(ids) :].tolist()
        assert answer["text"] == tokenizer.decode(answer["token_ids"])


def test_sampling_options_reach_the_engine(model: Path, tmp_path: Path) -> None:
    prompts = write_lines(
        tmp_path / "in.jsonl",
        {"prompt": "x", "seed": 1},
        {"prompt": "x", "seed": 2},
        {"prompt": "x", "seed": 1},
        {"prompt": "x", "temperature": 0},
        {"prompt": "x", "top_k": 1},
    )
    out = tmp_path / "out.jsonl"
    code, _, err = generate(
        "--model", model, "--prompts", prompts, "--out", out, "--temperature", 1.5, "--max-tokens", 16
    )
    assert (code, err) == (0, "")
    first, second, third, greedy, likeliest = (json.loads(line)["token_ids"] for line in out.read_text().splitlines())
    assert first == third != second
    assert greedy == likeliest != first


def test_stop_ids_end_an_answer(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "stop", "max_tokens": 20})
    assert generate("--model", model, "--prompts", prompts, "--out", out)[0] == 0
    tokens = json.loads(out.read_text())["token_ids"]
    write_lines(prompts, {"prompt": "stop", "max_tokens": 20, "stop_token_ids": [tokens[3]]})
    assert generate("--model", model, "--prompts", prompts, "--out", out)[0] == 0
    answer = json.loads(out.read_text())
    assert answer["token_ids"] == tokens[: tokens.index(tokens[3]) + 1]
    assert answer["finish_reason"] == "stop"


def test_stop_ids_of_the_command_line_are_added_to_those_of_a_line(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "stop", "max_tokens": 20})
    assert generate("--model", model, "--prompts", prompts, "--out", out)[0] == 0
    tokens = json.loads(out.read_text())["token_ids"]
    first = next(index for index, token in enumerate(tokens) if index and token != tokens[0])
    write_lines(prompts, {"prompt": "stop", "stop_token_ids": [tokens[0]]}, {"prompt": "stop"})
    stop = ("--stop-token-ids", f"{tokens[first]},{tokens[first]}")
    assert generate("--model", model, "--prompts", prompts, "--out", out, *stop)[0] == 0
    both, flag_only = (json.loads(line) for line in out.read_text().splitlines())
    assert both["token_ids"] == tokens[:1]
    assert flag_only["token_ids"] == tokens[: first + 1]
    assert flag_only["finish_reason"] == "stop"


def test_the_seed_decides_what_is_drawn(model: Path) -> None:
    drawn = ("--model", model, "--prompt", "x", "--temperature", 1.5, "--max-tokens", 16, "--seed")
    first, second, third = (generate(*drawn, seed) for seed in (1, 2, 1))
    assert first[0] == second[0] == 0
    assert first == third != second


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">/dev/full", 1, "megatoken: cannot write to standard output: No space left on device\n"),
        (">&-", 1, "megatoken: cannot write to standard output: Bad file descriptor\n"),
        *every(("2>&-", 0, "")),
        ("<&- >&- 2>&-", 1, ""),  # only the exit code can say it
    ],
)
def test_a_stream_that_takes_nothing_gives_no_traceback(model: Path, redirection: str, code: int, message: str) -> None:
    done = redirected(redirection, "generate", "--model", model, "--prompt", "a", "--max-tokens", 9)
    assert (done[0], done[2]) == (code, message)
    assert bool(done[1]) == (code == 0)


def test_a_prompt_from_the_command_line_is_streamed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "hello", "max_tokens": 12})
    assert generate("--model", model, "--prompts", prompts, "--out", out)[0] == 0
    code, stdout, err = generate("--model", model, "--prompt", "hello", "--max-tokens", 12)
    assert (code, stdout, err) == (0, json.loads(out.read_text())["text"] + "\n", "")


def test_chat_sends_the_prompt_by_the_models_template(tmp_path: Path) -> None:
    folder, out = make_checkpoint(tmp_path / "model"), tmp_path / "out.jsonl"
    asked = ("--model", folder, "--max-tokens", 12)
    code, stdout, err = generate(*asked, "--chat", "--prompt", "hello")
    assert (code, stdout) == (2, "") and "has no chat template; leave --chat out" in err
    (folder / "chat_template.jinja").write_text("<{{ messages[0].role }}>{{ messages[0].content }}")
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "<user>hello"}, {"prompt": "hello"})
    assert generate(*asked, "--prompts", prompts, "--out", out)[0] == 0
    chat, plain = (json.loads(line)["text"] + "\n" for line in out.read_text().splitlines())
    assert generate(*asked, "--chat", "--prompt", "hello") == (0, chat, "")
    assert generate(*asked, "--prompt", "hello") == (0, plain, f"{NOT_A_CHAT}\n")
    code, _, err = generate(*asked, "--chat", "--prompts", prompts, "--out", out)
    assert code == 2 and "--chat: applies to --prompt TEXT" in err
    code, _, err = generate(*asked, "--chat", "hello")
    assert code == 2 and "--chat: takes no value, but 'hello' follows it; its use: Send --prompt" in err


def test_a_streamed_prompt_is_held_against_vocabulary_and_context_like_one_of_a_file(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model")
    tokenizer = directory / "tokenizer.json"
    read = json.loads(tokenizer.read_text())
    context = json.loads((directory / "config.json").read_text())["max_position_embeddings"]
    prompt = "a" * (context - 9)
    out = tmp_path / "out.jsonl"
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": prompt})
    assert generate("--model", directory, "--prompts", prompts, "--out", out)[0] == 0
    answer = json.loads(out.read_text())
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (9, "length")
    assert generate("--model", directory, "--prompt", prompt) == (0, answer["text"] + "\n", "")
    assert generate("--model", directory, "--prompt", prompt, "--max-tokens", 10) == (
        2,
        "",
        f"megatoken: --prompt: a prompt of {context - 9} tokens and max_tokens 10 exceed the context of {context}; "
        "lower max_tokens to 9, or raise max_length where model and cache allow more\n",
    )

    read["model"]["vocab"]["a"] = 300
    tokenizer.write_text(json.dumps(read))
    warning = f"warning: {tokenizer} has ids up to 300, but the model's vocabulary ends at 255; "
    code, stdout, err = generate("--model", directory, "--prompt", "ba")
    assert (code, stdout) == (2, "")
    assert err.startswith(warning) and err.splitlines()[1:] == [
        "megatoken: --prompt: token id 300 at index 1 is outside the vocabulary of 256 (0 to 255); "
        "use the model's own tokenizer"
    ]
    code, _, err = generate("--model", directory, "--prompts", write_lines(prompts, {"prompt": "b"}), "--out", out)
    assert code == 0
    assert err.startswith(warning) and err.count("\n") == 1
    dry_run = ("run", "--model", directory, "--dry-run", "--out", tmp_path)
    assert f"# {warning.removeprefix('warning: ')}" in call_here(*dry_run, "--prompts", prompts)[1]
    assert "has ids up to" not in call_here(*dry_run)[1]  # no text, no tokenizer


def test_an_interrupted_stream_says_that_its_answer_is_cut_off(model: Path) -> None:
    config = load_run_config(None, {"model": str(model), "max-tokens": "30"})
    pieces = stream_prompt(config, load_flags(AnswerConfig, {}), "hello")
    next(pieces)
    with pytest.raises(KeyboardInterrupt, match="the answer is cut off"):
        pieces.throw(KeyboardInterrupt())


def test_named_shapes_have_no_text(tmp_path: Path) -> None:
    prompts, out = write_lines(tmp_path / "in.jsonl", {"prompt_token_ids": [5, 6], "max_tokens": 3}), tmp_path / "out"
    engine = ("--engine.max_length", 64, "--engine.cache_tokens=512")
    assert generate("--model", "tiny", "--prompts", prompts, "--out", out, *engine)[0] == 0
    answer = json.loads(out.read_text())
    assert answer["text"] is None
    assert len(answer["token_ids"]) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "in.jsonl, line 2: column 15"),
        ('{"prompt": ""}', "in.jsonl, line 2: prompt is"),
        ('{"prompt_token_ids": []}', "in.jsonl, line 2: prompt_token_ids is an empty list"),
        ('{"prompt_token_ids": [3, 256]}', "in.jsonl, line 2: token id 256"),
        ('{"prompt_token_ids": [-1]}', "in.jsonl, line 2: token id -1"),
        ('{"prompt": "a", "max_tokens": 0}', "in.jsonl, line 2: max_tokens is 0"),
        ('{"prompt": "a", "max_tokens": -5}', "in.jsonl, line 2: max_tokens is -5"),
        ('{"prompt": "a", "max_tokens": 64}', "in.jsonl, line 2: "),
        ('{"prompt": "%s"}' % ("a" * 80), "in.jsonl, line 2: "),
        ('{"promt": "a"}', 'in.jsonl, line 2: unknown key "promt"; did you mean prompt?'),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(model: Path, tmp_path: Path, line: str, message: str) -> None:
    prompts, out = write_lines(tmp_path / "in.jsonl", {"prompt": "fine"}, line), tmp_path / "out.jsonl"
    code, stdout, err = generate("--model", model, "--prompts", prompts, "--out", out)
    assert code == 2
    assert stdout == ""
    assert err.startswith("megatoken: ") and err.count("\n") == 1
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model {model}", "give either --prompts IN.jsonl with --out OUT.jsonl, or --prompt TEXT"),
        ("--model {model} --prompt a --prompts in.jsonl", "give either --prompts"),
        ("--model {model} --prompts in.jsonl", "--prompts IN.jsonl and --out OUT.jsonl go together"),
        ("", "give either --prompts IN.jsonl with --out OUT.jsonl, or --prompt TEXT"),
        ("--model {model} --prompt=", "--prompt is empty"),
        ("--model {model} --prompt a\udcff\udcfe", "--prompt: must be UTF-8 text, and some of its bytes are not\n"),
        ("--model tiny --prompt a", "tiny has no tokenizer.json"),
        ("--model nowhere --prompt a", "nowhere: no such directory"),
        ("--model {model} --prompts none.jsonl --out o", "none.jsonl: cannot be read"),
        ("--model {model} --prompts /dev/null --out o", "/dev/null: cannot be read: it is a device, not a file"),
        ("--model {model} --prompts {model} --out o", "cannot be read: it is a directory, not a file"),
        ("--model {model} --prompt a --engine.max_batched_tokens", "--engine.max_batched_tokens: needs a value"),
        ("--model {model} --prompts none.jsonl --out {model}", "not a regular file; choose another"),
        ("--model {model} --prompts none.jsonl --out no/where.jsonl", "no/where.jsonl: there is no folder "),
        ("--model {model} --prompts none.jsonl --out " + "o" * 300, "File name too long"),
        ("--model {model} --prompt a --temperature -1", "--temperature: must be at least 0, got '-1'"),
        ("--model {model} --prompt a --temperature nan", "--temperature: must be a finite number, got 'nan'"),
        ("--model {model} --prompt a --top_p 0", "--top-p: must be more than 0, got '0'"),
        ("--model {model} --prompt a --stop-token-ids 3,256", "--stop-token-ids: 256 is outside the vocabulary of 256"),
        ("--model {model} --prompts none.jsonl --out o --stop-token-ids -1", "--stop-token-ids: -1 is outside"),
        ("--model {model} --prompt a --engine.threads 99999", "engine.threads is 99,999, but this process may use "),
        ("--model {model} --prompt a --max-tokens 0", "--max-tokens: must be at least 1 token, got '0'"),
        ("--model {model} --prompt a --precision fp4", "'bf16' or 'fp8'; fp4 is supported on simulated GPUs only"),
        ("--model {model} --prompt a --precision int3", "--precision: must be"),
        ("--model {model} --prompt a --engine.max_batched_token 3", "did you mean --engine.max_batched_tokens?"),
        ("--model {model} --prompt a --engine.max_length 9999", "max_length 9,999"),
        ("--model {model} --prompt a --rules v5.1", "--rules: unknown flag"),
        ("--model {model} --prompt a --temprature 1", "--temprature: unknown flag; did you mean --temperature?"),
        ("--model {model} --prompt a --topk 1", "--topk: unknown flag; did you mean --top-k?"),
        ("--model {model} --prompt " + "a" * 70, "70"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(model: Path, arguments: str, message: str) -> None:
    code, stdout, err = generate(*(word.format(model=model) for word in arguments.split()))
    assert code == 2
    assert stdout == ""
    assert err.startswith("megatoken: ") and err.count("\n") == 1
    assert message in err


def test_answers_replace_neither_their_prompts_nor_what_is_no_file(model: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "x"})
    before = prompts.read_text()
    code, _, err = generate("--model", model, "--prompts", prompts, "--out", prompts)
    assert (code, prompts.read_text()) == (2, before)
    assert "these are the prompts" in err
    kept = prompts.rename(tmp_path / "out.jsonl.partial")
    code, _, err = generate("--model", model, "--prompts", kept, "--out", tmp_path / "out.jsonl")
    assert (code, kept.read_text()) == (2, before)
    assert "these are the prompts" in err
    prompts = kept.rename(prompts)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code, _, err = generate("--model", model, "--prompts", prompts, "--out", pipe)
    assert (code, pipe.is_fifo()) == (2, True)
    assert "not a regular file" in err


def test_text_without_a_tokenizer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", tokenizer=False)
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt_token_ids": [1]}, {"prompt": "a"})
    code, _, err = generate("--model", tmp_path / "model", "--prompts", prompts, "--out", tmp_path / "out.jsonl")
    assert code == 2
    assert "in.jsonl, line 2: the prompt is text but the model has no tokenizer.json" in err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_keeps_the_finished_answers_and_the_old_file(
    tmp_path: Path, number: signal.Signals
) -> None:
    prompts, out, kept = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "out.jsonl.partial"))
    line = {"prompt_token_ids": [5] * 100, "max_tokens": 1900}
    write_lines(prompts, *[line] * 3, *[line | {"max_tokens": 2}] * 2, *[line] * 495)
    out.write_text("old\n")
    kept.write_text("older\n" * 9)
    arguments = ("--model", "tiny", "--prompts", prompts, "--out", out, "--engine.threads", 1)
    with started("generate", *arguments, before=partial(signal.signal, signal.SIGINT, signal.SIG_DFL)) as process:
        while kept.read_text().startswith("older") or kept.read_text().count("\n") < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(number)
        stdout, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, stdout) == (130, "")
    assert err == f"megatoken: interrupted; 2 of 500 answers are in {kept}\n"
    assert out.read_text() == "old\n"
    answers = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(answer["index"], len(answer["token_ids"])) for answer in answers] == [(3, 2), (4, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.partial"]


def test_a_command_interrupted_before_its_first_answer_writes_nothing(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(prompts, *[{"prompt_token_ids": [5] * 100, "max_tokens": 1900}] * 500)
    with started("generate", "--model", "tiny", "--prompts", prompts, "--out", out, "--engine.threads", 1) as process:
        wait_until_busy(process)
        process.send_signal(signal.SIGTERM)
        words = "megatoken: interrupted; nothing was written\n"
        assert process.communicate(timeout=TIMEOUT_SECONDS) == ("", words)
    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_answers_before_a_full_disk_are_kept(model: Path, tmp_path: Path) -> None:
    """No file may grow beyond a limit that the second answer exceeds."""
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(prompts, {"prompt": "a", "max_tokens": 2}, {"prompt": "a", "max_tokens": 50})
    code, stdout, err = call(
        *("generate", "--model", model, "--prompts", prompts, "--out", out),
        before=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (120, 120)),
    )
    assert (code, stdout, err.count("\n")) == (2, "", 1)
    assert f"{out}.partial: cannot be written (File too large); " in err
    assert err.endswith(f"; 1 of 2 answers are in {out}.partial\n")
    assert json.loads((tmp_path / "out.jsonl.partial").read_text().splitlines()[0])["index"] == 0
    assert not out.exists()


def test_answers_before_a_model_that_computes_no_numbers_are_kept(tmp_path: Path) -> None:
    model = make_overflowing_checkpoint(tmp_path / "model", "z")
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(prompts, *[{"prompt": letter, "max_tokens": 1} for letter in "abz"])
    one_by_one = ("--engine.max_sequences", 1, "--engine.max_batched_tokens", 1)
    code, stdout, err = generate("--model", model, "--prompts", prompts, "--out", out, *one_by_one)
    assert (code, stdout, err.count("\n")) == (1, "", 1)
    assert "logits after 1 token of a request are not finite" in err
    assert err.endswith(f"; 2 of 3 answers are in {out}.partial\n")
    answers = (tmp_path / "out.jsonl.partial").read_text().splitlines()
    assert [json.loads(answer)["index"] for answer in answers] == [0, 1]
    assert not out.exists()


def test_no_partial_file_is_left_by_a_command_that_succeeds(model: Path, tmp_path: Path) -> None:
    prompts, out = write_lines(tmp_path / "in.jsonl", {"prompt": "x", "max_tokens": 2}), tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.partial").write_text("of an interrupted one\n")
    assert generate("--model", model, "--prompts", prompts, "--out", out)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_help_names_every_option_and_loads_nothing_heavy() -> None:
    code, stdout, err = call("generate", "--help")
    assert (code, err) == (0, "")
    for option in (
        "--model",
        "--prompts",
        "--out",
        "--prompt",
        "--max-tokens",
        "--temperature",
        "--seed",
        "--engine.max_batched_tokens",
    ):
        assert option in stdout
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, stdout, _ = call("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    assert code == 0
    assert "..." not in stdout.partition("Commands:")[2]


def test_the_example_of_the_docs_is_answered_as_it_says() -> None:
    text = (Path(__file__).parents[1] / "docs" / "accuracy.md").read_text()
    example = json.loads(text.partition("```json\n")[2].partition("```")[0])
    out = call_here("generate", "--prompt", example["prompt"], "--max-tokens", example["max_tokens"])
    assert out == (0, f"{example['reference']}\n", "")
    as_chat = call_here("generate", "--chat", "--prompt", example["prompt"], "--max-tokens", example["max_tokens"])
    assert as_chat == (0, f"{example['reference']}\n", "")


def test_a_chat_with_a_model_that_does_not_exist_says_so() -> None:
    code, _, err = call_here("generate", "--chat", "--prompt", "hi", "--model", "nope")
    assert code == 2 and "nope: no such directory, and not one of the shapes" in err
