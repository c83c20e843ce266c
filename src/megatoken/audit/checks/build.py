"""Which LoadGen wrote the log: its release, its source files, and the order of the dates it gives."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import RunView, observe
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.loadgen_builds import builds
from megatoken.mlperf.run_figures import logged_start

GENERATED = "/mlperf_conf.h"  # made from mlperf.conf at build time
DAY_SECONDS = 86_400
QUARTER_SECONDS, WIDEST_ZONE_SECONDS = 900, 14 * 3600


def check_build(run: RunView) -> Iterator[Observation]:
    """Source hashes against the releases examined, a clean checkout, and dates in their order."""
    log = run.detail
    version = log.text("loadgen_version")
    if version is None:
        return
    yield from _sources(run, version)
    status = log.text("loadgen_git_status_message")
    if status is not None:
        yield observe(
            "build.clean",
            status in ("", "NA"),
            "LoadGen built from an unmodified checkout",
            shown(status) or "unmodified",
            run.at("loadgen_git_status_message"),
            run.unmet if run.rules_claimed else Severity.WARN,
        )
    yield from _dates(run)
    yield from _commit(run, version)


def _commit(run: RunView, version: str) -> Iterator[Observation]:
    """Version, commit, its date and the git log are of one checkout."""
    log = run.detail
    message = log.text("loadgen_git_log_message") or "NA"
    name, _, commit = version.partition(" @ ")
    known = next((build for build in builds() if commit and build.commit == commit[:10]), None)
    problems = []
    if known is not None and name != known.version:
        problems.append(f"version {known.version} at commit {known.commit}, not {shown(name)}")
    date = log.text("loadgen_git_commit_date")
    if known is not None and date is not None and not _same_date(date, known.commit_date):
        problems.append(f"commit {known.commit} of {known.commit_date}, not of {shown(date)}")
    if message != "NA" and re.fullmatch(r"[0-9a-f]{7,40}", commit) and not message.startswith(commit):
        problems.append(f"a git log that starts with {commit}, not with {shown(message[:40])}")
    if known is not None or message != "NA":
        yield observe(
            "build.commit",
            not problems,
            "; ".join(problems) or "version, commit, its date and the git log of one checkout",
            shown(f"{version}, {date}, {message[:60]}"),
            run.at("loadgen_version", "loadgen_git_commit_date", "loadgen_git_log_message"),
        )


def _same_date(found: str, known: str) -> bool:
    """A moment, or a day, as far as the known one tells."""
    try:
        one, other = datetime.fromisoformat(found), datetime.fromisoformat(known)
    except ValueError:
        return False
    if "T" not in known:
        return abs((one.date() - other.date()).days) <= 1
    return one == other if (one.tzinfo is None) is (other.tzinfo is None) else False


def _sources(run: RunView, version: str) -> Iterator[Observation]:
    mine = run.detail.get("loadgen_file_sha1")
    name, _, commit = version.partition(" @ ")
    where = run.at("loadgen_file_sha1", "loadgen_version")
    if not isinstance(mine, dict) or not mine:
        yield observe("build.sources", None, "SHA-1 of LoadGen's source files", "none", where)
        return
    same_commit = next((build for build in builds() if commit and build.commit == commit[:10]), None)
    if same_commit is not None:
        differs = _differing(mine, same_commit.sha1)
        yield observe(
            "build.sources",
            not differs,
            f"the files of LoadGen {same_commit.version} at commit {same_commit.commit}",
            shown(f"other files: {', '.join(differs)}") if differs else f"all {len(mine)} files",
            where,
        )
        return
    code = {path: sha1 for path, sha1 in mine.items() if path.endswith((".cc", ".h")) and path != GENERATED}
    same_version = [build for build in builds() if build.version == name]
    alike = next((build for build in (*same_version, *builds()) if not _differing(code, build.sha1)), None)
    if alike is not None:
        found = f"commit {shown(commit or 'unknown')} is not known here, but its C++ files are those of {alike.version}"
        yield observe("build.sources", True, "source files of a known release", found, where)
        return
    nearest = min(builds(), key=lambda build: len(_differing(code, build.sha1)))
    found = f"version {shown(version)} is not known here; nearest is {nearest.version}, with other "
    found += shown(", ".join(_differing(code, nearest.sha1)))
    yield observe("build.sources", None, "source files of a known release", found, where)


def _differing(mine: Mapping[str, object], known: Mapping[str, str]) -> list[str]:
    """Files whose hash is another, and C++ files that are there only on one side."""
    names = [name for name, sha1 in mine.items() if name in known and name != GENERATED and sha1 != known[name]]
    names += [name for name in mine if name.endswith(".cc") and name not in known and "generated" not in name]
    names += [name for name in known if name.endswith(".cc") and name not in mine]
    return sorted(shown(name) for name in names)


def _dates(run: RunView) -> Iterator[Observation]:
    """Committed, then built, then run. The test's date is local time, so a day of slack."""
    log = run.detail
    steps = [
        ("loadgen_git_commit_date", _iso(log, "loadgen_git_commit_date")),
        ("loadgen_build_date_utc", _iso(log, "loadgen_build_date_utc")),
        ("test_datetime", logged_start(log)),
    ]
    known = [(key, time) for key, time in steps if time is not None]
    wrong = [
        (before, after)
        for (before, early), (after, late) in itertools.pairwise(known)
        if (early - late).total_seconds() > DAY_SECONDS
    ]
    keys = [key for pair in wrong for key in pair]
    local, utc = _iso(log, "loadgen_build_date_local"), _iso(log, "loadgen_build_date_utc")
    if local is not None and utc is not None:
        apart = (local - utc).total_seconds()  # a time zone: whole quarters of an hour
        zone = round(apart / QUARTER_SECONDS) * QUARTER_SECONDS
        if abs(zone) > WIDEST_ZONE_SECONDS or abs(apart - zone) > 1.0:
            keys += ["loadgen_build_date_local", "loadgen_build_date_utc"]
    yield observe(
        "build.dates",
        not keys if len(known) > 1 else None,
        "LoadGen committed before it was built, built at one moment by both its clocks, and before it ran",
        "; ".join(run.text(key) for key in keys or [key for key, _ in known]) or "no dates",
        run.at(*keys) if keys else run.at("loadgen_build_date_utc"),
    )


def _iso(log: DetailLog, key: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(log.text(key) or "")
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
