"""``megatoken init``: a folder with the files that the other commands start from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from itertools import islice
from pathlib import Path

import yaml

from megatoken.config import KEYS
from megatoken.dossier.form import shipped_form
from megatoken.errors import UsageError
from megatoken.files import storage_error, write_text
from megatoken.runs.seal import refuse_sealed

CONFIG, PROMPTS, LIMITS, CLAIMS, FORM = "run.yaml", "prompts.jsonl", "limits.yaml", "claims.yaml", "form.yaml"
SAMPLE_PROMPTS = 64
GIVEN = {"prompts": PROMPTS}  # settings that the configuration of a workspace gives

_HEAD = f"""# Settings of a run: megatoken run {CONFIG} --slo {LIMITS}
# Take the "# " away from a key to set it; a key below a section needs the section's line too. Flags override this file.
"""

_LIMITS = """# Your limits: megatoken run run.yaml --slo limits.yaml, or megatoken check RUN --slo limits.yaml
# Delete what you do not need. Percentiles: p50, p90, p95, p99, p999.
output_tokens_per_second: 10           # at least
tpot_seconds: {p50: 1, p99: 5}         # at most: time per output token
# ttft_seconds: {p99: 2}               # at most: time to first token, of server and interactive
# latency_seconds: {p99: 30}           # at most: end to end, of server and interactive
# accuracy: {exact_match: 90}          # at least, in percent; also rouge1, rouge2, rougeL
# dollars_per_request: 0.01            # at most; needs dollars_per_hour
"""

_CLAIMS = """# Claims to check: megatoken audit RUN --claims claims.yaml --out audit
# Write down each number that you were given, with its unit, and how it follows from the artefacts (docs/claims.md).
schema_version: 1
title: What we were promised
source: the offer
claims:
  - id: rate
    text: the machine writes at least 10 tokens a second
    value: 10
    unit: tokens/s
    relation: at least
    scope: node
  - id: growth
    text: the next release will be 30 % faster
    value: 30
    unit: "%"
    presented_as: forecast
    settle: [a run of the next release with the same prompts on the same machine]
"""


def make_workspace(folder: Path) -> list[tuple[Path, bool]]:
    """Write the files of a workspace that are not there yet; returns each with whether it was made now.

    Raises:
        UsageError: ``folder`` is a file, or in a sealed folder.
        StorageError: the disk refuses.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: a file of that name exists; name another folder")
    refuse_sealed(folder, movable=False)
    texts = {
        CONFIG: "".join(_configuration()),
        PROMPTS: "".join(_prompts()),
        LIMITS: _LIMITS,
        CLAIMS: _CLAIMS,
        FORM: shipped_form(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = [(folder / name, not (folder / name).exists()) for name in texts]
    except OSError as error:
        raise storage_error(folder, error, movable=False) from error
    for path, missing in made:
        if missing:
            write_text(path, texts[path.name], movable=False)
    return made


def _configuration() -> Iterator[str]:
    """Every setting with its default and what it means, as comments; limits have a file of their own."""
    yield _HEAD
    section = ""
    for key, setting in KEYS.items():
        parent, _, name = key.rpartition(".")
        if parent.partition(".")[0] == "limits":
            continue
        if parent != section:
            section = parent
            yield f"\n# {parent}:\n" if parent else "\n"
        value = GIVEN.get(key, setting.default)
        mark = "" if key in GIVEN else "# "
        line = f"{mark}{'  ' if parent else ''}{name}: {_scalar(value)}"
        yield f"{line:<40}  # {setting.description}\n"


def _scalar(value: object) -> str:
    text = yaml.safe_dump(value if isinstance(value, bool | int | float | None) else str(value))
    return text.removesuffix("...\n").strip()


def _prompts() -> Iterator[str]:
    """The first tasks of the reference model's held-out set, which it can answer, each with its expected answer."""
    held_out = files("megatoken").joinpath("data", "reference_model", "held_out.jsonl")
    with held_out.open(encoding="utf-8") as lines:
        for line in islice(lines, SAMPLE_PROMPTS):
            yield json.dumps(json.loads(line), ensure_ascii=False) + "\n"
