"""Which LoadGen wrote the log: its release, its source files, and the order of the dates it gives."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime

from megatoken.audit.finding import Outcome, Severity, check, listed, outcome, shown
from megatoken.audit.view import RunView
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.loadgen_builds import Build, build_of, nearest_build
from megatoken.mlperf.run_figures import beyond_time_zone, elapsed, logged_start

DAY_SECONDS = 86_400


def _has_version(run: RunView) -> bool:
    return run.detail.text("loadgen_version") is not None


def _version(run: RunView) -> tuple[str, str, Build | None]:
    """Version, commit, and the known build of that commit."""
    name, _, commit = (run.detail.text("loadgen_version") or "").partition(" @ ")
    return name, commit, build_of(commit)


@check("build.sources", "LoadGen's sources are a release's", "A changed LoadGen can report anything.", _has_version)
def sources(run: RunView) -> Outcome:
    mine, where = run.detail.get("loadgen_file_sha1"), run.at("loadgen_file_sha1", "loadgen_version")
    name, commit, build = _version(run)
    if not isinstance(mine, dict) or not mine:
        return outcome(None, "SHA-1 of LoadGen's source files", "none", where)
    if build is not None:
        differs = build.differing(mine)
        found = shown(f"other files: {', '.join(differs)}") if differs else f"all {len(mine)} files"
        return outcome(not differs, f"the files of LoadGen {build.version} at commit {build.commit}", found, where)
    expected = "source files of a known release"
    nearest, others = nearest_build(mine, name)
    if not others:
        found = f"commit {shown(commit or 'unknown')} is not known here; its C++ files are those of {nearest.version}"
        return outcome(True, expected, found, where)
    found = f"version {shown(run.detail.text('loadgen_version'))} is not known here; nearest is {nearest.version}"
    return outcome(None, expected, f"{found}, with other {shown(', '.join(others))}", where)


@check("build.clean", "LoadGen was built unmodified", "With uncommitted changes it cannot be rebuilt.", _has_version)
def clean(run: RunView) -> Outcome | None:
    status = run.detail.text("loadgen_git_status_message")
    if status is None:
        return None
    where, otherwise = run.at("loadgen_git_status_message"), run.unmet if run.rules_claimed else Severity.WARN
    expected = "LoadGen built from an unmodified checkout"
    return outcome(status in ("", "NA"), expected, shown(status) or "unmodified", where, otherwise)


@check("build.commit", "Version, commit and git log agree", "All come from one checkout.", _has_version)
def commit(run: RunView) -> Outcome | None:
    log = run.detail
    name, commit, known = _version(run)
    message, date = log.text("loadgen_git_log_message") or "NA", log.text("loadgen_git_commit_date")
    if known is None and message == "NA":
        return None
    problems = []
    if known is not None and name != known.version:
        problems.append(f"version {known.version} at commit {known.commit}, not {shown(name)}")
    if known is not None and date is not None and not _same_date(date, known.commit_date):
        problems.append(f"commit {known.commit} of {known.commit_date}, not of {shown(date)}")
    if message != "NA" and re.fullmatch(r"[0-9a-f]{7,40}", commit) and not message.startswith(commit):
        problems.append(f"a git log that starts with {commit}, not with {shown(message[:40])}")
    expected = listed(problems, "version, commit, its date and the git log of one checkout")
    where = run.at("loadgen_version", "loadgen_git_commit_date", "loadgen_git_log_message")
    return outcome(not problems, expected, shown(f"{log.text('loadgen_version')}, {date}, {message[:60]}"), where)


def _same_date(found: str, known: str) -> bool:
    """The same moment; the same day where only the day is known."""
    try:
        one, other = datetime.fromisoformat(found), datetime.fromisoformat(known)
    except ValueError:
        return False
    if "T" not in known:
        return abs((one.date() - other.date()).days) <= 1
    return one == other if (one.tzinfo is None) is (other.tzinfo is None) else False


@check("build.dates", "Dates are in order", "A run cannot precede the program that ran it.", _has_version)
def dates(run: RunView) -> Outcome:
    """Committed, then built, then run. The test's date is local time, so a day of slack."""
    log = run.detail
    steps = {key: _iso(log, key) for key in ("loadgen_git_commit_date", "loadgen_build_date_utc")}
    known = [(key, time) for key, time in {**steps, "test_datetime": logged_start(log)}.items() if time is not None]
    keys: list[str] = []
    for (before, early), (after, late) in itertools.pairwise(known):
        if elapsed(late, early) > DAY_SECONDS:
            keys += (before, after)
    local, utc = _iso(log, "loadgen_build_date_local"), steps["loadgen_build_date_utc"]
    if local is not None and utc is not None and abs(beyond_time_zone(elapsed(utc, local))) > 1.0:
        keys += ("loadgen_build_date_local", "loadgen_build_date_utc")
    expected = "LoadGen committed before it was built, built at one moment by both its clocks, and before it ran"
    found, where = run.text(*(keys or [key for key, _ in known])), run.at(*(keys or ["loadgen_build_date_utc"]))
    return outcome(not keys if len(known) > 1 else None, expected, found or "no dates", where)


def _iso(log: DetailLog, key: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(log.text(key) or "")
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
