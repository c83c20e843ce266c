"""``megatoken sweep``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatoken.cli.flags import (
    ENDPOINT_KEYS,
    FLAGS,
    MODEL_KEYS,
    OUT_KEYS,
    PROMPT_KEYS,
    ConfigFile,
    DryRun,
    Rack,
    Slo,
    flag,
    key_command,
)
from megatoken.cli.output import Json
from megatoken.cli.run import measure_and_show
from megatoken.engine.config import REFERENCE
from megatoken.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from megatoken.config import RunConfig
    from megatoken.harness.command import Test
    from megatoken.harness.prepare import Prepared
    from megatoken.harness.progress import Progress
    from megatoken.harness.sweep.plan import SweepPlan
    from megatoken.harness.sweep.stages import StagesPlan
    from megatoken.targets import Target

# Settings that a sweep makes itself: it has its own loads, and claims no MLPerf rules.
_OWN: tuple[str, ...] = (
    *("scenario", "mode", "rules", "compliance", "rate", "find_rate", "probe_seconds", "samples"),
    *("text", "rack.count"),
)
_OWN += ("min_duration_seconds",)
_SETTLE_SECONDS = 2.0  # of --settle

SweepCommand = key_command(
    {
        **MODEL_KEYS,
        **ENDPOINT_KEYS,
        **PROMPT_KEYS,
        "ttft-limit": ("SECONDS", "Longest time to first token that counts as good."),
        "tpot-limit": ("SECONDS", "Longest time per output token that counts as good."),
        "repeat": ("N", "Number of times to run each load."),
        **OUT_KEYS,
    }
)


def sweep(
    ctx: typer.Context,
    config_file: ConfigFile = None,
    concurrency: Annotated[
        str | None,
        flag("1,2,4|1-64|8-64@60", "Closed loop: requests at once; 1-64 doubles; LOAD@SECONDS: stages of one run."),
    ] = None,
    rates: Annotated[
        str | None, flag("0.5,1,2|auto|1-9@60", "Open loop: requests per second; auto: by the warm-up; or stages.")
    ] = None,
    arrivals: Annotated[
        Literal["constant", "poisson", "gamma"] | None,
        flag("constant|poisson|gamma", "Arrivals of --rates. Default: poisson."),
    ] = None,
    burstiness: Annotated[
        float | None, flag("SHAPE", "Of gamma arrivals: 1 is Poisson, less is burstier. Default: 0.5.")
    ] = None,
    trace: Annotated[
        Path | None, flag("FILE", "Replay a trace of Mooncake, BurstGPT or Azure, with its times and lengths.")
    ] = None,
    speed: Annotated[str | None, flag("0.5,1,2", "How many times faster to replay the trace. Default: 1.")] = None,
    users: Annotated[str | None, flag("1,2,4|1-64", "Conversations: numbers of users who ask, read and think.")] = None,
    conversations: Annotated[
        Path | None, flag("FILE", "What users say: ShareGPT, or JSON lines of messages. Answers are the target's own.")
    ] = None,
    profile: Annotated[str | None, flag("NAME", "Workload profile of megatoken plan as what users say.")] = None,
    think: Annotated[
        float | None, flag("SECONDS", "Mean pause of a user before the next turn. Default: the profile's, else 0.")
    ] = None,
    shared_prefix: Annotated[int, flag("TOKENS", "Random tokens that every conversation begins with.")] = 0,
    window: Annotated[
        float | None, flag("SECONDS", "Length of the measured window of each load. Default: 10; with --rules, theirs.")
    ] = None,
    settle: Annotated[float | None, flag("SECONDS", "Shortest time of a load before its window. Default: 2.")] = None,
    rules: Annotated[
        str | None,
        flag("endpoints-v1.0", "Claim the rules of MLPerf Endpoints: verdicts for each point and the curve."),
    ] = None,
    seed_set: Annotated[str | None, flag("ID", "Published seed set, with --rules. Default: A.")] = None,
    disclosures: Annotated[
        Path | None, flag("FILE", "What a submitter states for each point (YAML); goes into point.yaml.")
    ] = None,
    neighbour: Annotated[
        str | None,
        flag("FLAGS", "Run each load again next to another sweep with these flags, such as another --api-key-file."),
    ] = None,
    rack: Rack = None,
    slo: Slo = None,
    dry_run: DryRun = False,
    json_only: Json = False,
) -> int:
    """Measure latency against throughput.

    One load after the other, closed loop or open loop; finds the knee.
    """
    if window is not None and not 1 <= window <= 86_400:
        raise UsageError(f"--window {window:g}: expected 1 to 86,400 seconds")
    if settle is not None and not 0 <= settle <= 86_400:
        raise UsageError(f"--settle {settle:g}: expected 0 to 86,400 seconds")
    if rates is None and arrivals is not None:
        raise UsageError(f"--arrivals {arrivals}: only with --rates; leave it out, or give --rates")
    config = _config(config_file, ctx.meta[FLAGS], rack, slo)
    other_load = _neighbour(neighbour, rules, config)
    if rules is not None:
        if settle is not None:
            raise UsageError(f"--settle {settle:g}: --rules decide what comes before the window; leave it out")
        claim = _claim(
            rules, seed_set or "A", disclosures, concurrency, window, config, others=[trace, speed, rates, burstiness]
        )
        return measure_and_show(config, claim, dry_run=dry_run, json_only=json_only)
    if disclosures is not None or seed_set is not None:
        raise UsageError("--disclosures and --seed-set go with --rules")
    if users is not None:
        others = [trace, speed, rates, burstiness, concurrency]
        asked = _talk(users, conversations, profile, think, shared_prefix, settle, window, config, others, other_load)
        return measure_and_show(*asked, dry_run=dry_run, json_only=json_only, brings_requests=True)
    if conversations is not None or profile is not None or think is not None or shared_prefix:
        raise UsageError("--conversations, --profile, --think and --shared-prefix go with --users")
    plan: SweepPlan | StagesPlan
    if trace is not None or speed is not None:
        plan = _replay(trace, speed, settle, others=[concurrency, rates, burstiness, window])
    else:
        plan = _plan(concurrency, rates, arrivals, burstiness, window, settle)

    def test(prepared: Prepared, config: RunConfig, target: Target, progress: Progress) -> Path:
        from megatoken.harness.sweep.sweep import run_sweep

        return run_sweep(prepared, config, plan, target, progress, other_load)

    return measure_and_show(config, test, dry_run=dry_run, json_only=json_only)


def _neighbour(text: str | None, rules: str | None, config: RunConfig) -> list[str]:
    """The flags of a second load."""
    if text is None:
        return []
    if config.endpoint.urls is None or rules is not None:
        raise UsageError("--neighbour: only on servers, without --rules; give --endpoint")
    try:
        flags = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--neighbour: {error}") from None
    if not any(flag.partition("=")[0] in ("--concurrency", "--rates", "--users", "--trace") for flag in flags):
        raise UsageError(f"--neighbour {text}: names no load; give one, such as --concurrency 16")
    return flags


def _config(config_file: Path | None, given: Mapping[str, str], rack: str | None, slo: Path | None) -> RunConfig:
    """The configuration of every point: that of the scenario server, whose limits and first tokens a sweep needs."""
    from megatoken.config import KEYS, flag_key, load_run_config

    for name in given:
        if (key := flag_key(name)) in _OWN:
            raise ConfigError(f"--{name}: not a setting of a sweep, which has its own loads; leave it out")
    config = load_run_config(config_file, {**given, "scenario": "server"}, rack, slo)
    for key in _OWN[1:]:
        if attrgetter(key)(config) != KEYS[key].default:
            raise ConfigError(f"{key}: not a setting of a sweep, which has its own loads; leave it out")
    return config


def _talk(
    users: str,
    conversations: Path | None,
    profile: str | None,
    think: float | None,
    shared_prefix: int,
    settle: float | None,
    window: float | None,
    config: RunConfig,
    others: Sequence[object],
    other_load: Sequence[str],
) -> tuple[RunConfig, Test]:
    """A sweep over numbers of users, and its configuration."""
    from megatoken.datasets.conversations import read_conversations
    from megatoken.harness.sweep.plan import values_of
    from megatoken.harness.sweep.point import Phases
    from megatoken.planning.workloads import load_profiles

    if any(other is not None for other in others):
        raise UsageError("--users is itself a load; leave out --concurrency, --rates, --trace and their flags")
    if (conversations is None) is (profile is None):
        raise UsageError("--users: give what they say, with --conversations FILE or --profile NAME")
    if think is not None and not 0 <= think <= 86_400:
        raise UsageError("--think: from 0 to 86,400 seconds")
    if not 0 <= shared_prefix <= 1_000_000:
        raise UsageError("--shared-prefix: from 0 to 1,000,000 tokens")
    values = values_of("--users", users, whole=True)
    chosen = load_profiles(None, [profile])[0] if profile is not None else None
    recorded = read_conversations(conversations) if conversations is not None else None
    phases = Phases(_SETTLE_SECONDS if settle is None else settle, 10.0 if window is None else window)
    if config.endpoint.urls is not None and config.endpoint.api is None and config.model == REFERENCE:
        config = config.model_copy(update={"endpoint": config.endpoint.model_copy(update={"api": "chat"})})

    def test(prepared: Prepared, config: RunConfig, target: Target, progress: Progress) -> Path:
        from megatoken.harness.sweep.ruled import with_tokenizer
        from megatoken.harness.sweep.sweep import run_sweep
        from megatoken.harness.sweep.users import Talk, users_plan
        from megatoken.planning.workloads import profile_conversations

        prepared = with_tokenizer(prepared)
        tokenizer = prepared.tokenizer
        pause = None
        if chosen is not None:
            said = profile_conversations(chosen, config.seed)
            mean, pause = (chosen.tool_seconds, chosen.think_seconds) if think is None else (think, think)
        else:
            assert recorded is not None
            count = (lambda text: len(tokenizer.encode(text, add_special=False))) if tokenizer else None
            said, mean = recorded.counted(count), think or 0.0
        talk = Talk(said, mean, pause, shared_prefix)
        plan = users_plan(values, talk, phases, prepared, target)
        return run_sweep(prepared, config, plan, target, progress, other_load)

    return config, test


def _claim(
    rules: str,
    seed_set: str,
    disclosures: Path | None,
    concurrency: str | None,
    window: float | None,
    config: RunConfig,
    others: list[object],
) -> Test:
    """A sweep by the rules of MLPerf Endpoints."""
    from megatoken.harness.sweep.plan import LARGEST_CONCURRENCY, values_of
    from megatoken.harness.sweep.ruled import RuledPlan, read_disclosures, with_tokenizer
    from megatoken.mlperf.endpoints import chosen_points, endpoint_rules, regions

    known = endpoint_rules(rules)
    if any(other is not None for other in others):
        raise UsageError(f"--rules {rules}: fixed concurrency only; leave out --rates, --trace and their flags")
    if seed_set not in known["seed_sets"]:
        raise UsageError(f"--seed-set {seed_set}: published are {', '.join(known['seed_sets'])}")
    if config.repeat != 1:
        raise UsageError(f"--rules {rules}: a curve has each point once; leave out --repeat")
    most = min(LARGEST_CONCURRENCY, config.endpoint.max_in_flight)
    values = chosen_points(most)
    if concurrency is not None:
        values = tuple(round(one) for one in values_of("--concurrency", concurrency, whole=True))
    regions(values[0], values[-1])
    over_http = config.endpoint.urls is not None
    if over_http and values[-1] > config.endpoint.max_in_flight:
        raise UsageError(
            f"--concurrency {values[-1]}: the client keeps {config.endpoint.max_in_flight} requests open; raise"
            " --endpoint.max_in_flight"
        )
    stated = read_disclosures(disclosures) if disclosures is not None else {}
    models = {model["benchmark"]: name for name, model in known["models"].items()}

    def test(prepared: Prepared, config: RunConfig, target: Target, progress: Progress) -> Path:
        from megatoken.harness.sweep.sweep import run_sweep

        plan = RuledPlan(
            values,
            rules,
            seed_set,
            with_tokenizer(prepared),
            window,
            over_http,
            config.endpoint.max_in_flight if over_http else None,
            config.endpoint.stream is not False,
            models.get(config.benchmark or ""),
            stated,
        )
        return run_sweep(plan.prepared, config, plan, target, progress)

    return test


def _replay(trace: Path | None, speed: str | None, settle: float | None, others: list[object]) -> SweepPlan:
    from megatoken.datasets.traces import read_trace
    from megatoken.harness.sweep.plan import SweepPlan, values_of
    from megatoken.harness.sweep.point import Phases

    if trace is None or any(other is not None for other in others):
        raise UsageError(
            "--trace FILE brings its own load; --speed goes with it, --concurrency, --rates and --window do not"
        )
    values = values_of("--speed", speed or "1", whole=False)
    phases = Phases(_SETTLE_SECONDS if settle is None else settle, None)
    return SweepPlan("speed", values, "poisson", 1.0, phases, read_trace(trace))


def _plan(
    concurrency: str | None,
    rates: str | None,
    arrivals: Literal["constant", "poisson", "gamma"] | None,
    burstiness: float | None,
    window: float | None,
    settle: float | None,
) -> SweepPlan | StagesPlan:
    from megatoken.harness.sweep.plan import SweepPlan, values_of
    from megatoken.harness.sweep.point import Phases
    from megatoken.harness.sweep.stages import StagesPlan, are_stages, stages_of

    if concurrency is not None and rates is not None:
        raise UsageError("--concurrency is a closed loop and --rates an open loop; give one of them")
    if burstiness is not None and (arrivals != "gamma" or not 0 < burstiness < 1000):
        raise UsageError(f"--burstiness {burstiness:g}: expected a number above zero, with --arrivals gamma")
    shape = 0.5 if burstiness is None else burstiness
    for name, seconds in (("--window", window), ("--settle", settle)):
        if are_stages(concurrency or rates or "") and seconds is not None:
            raise UsageError(f"{name}: stages have their own lengths; leave it out")
    arrivals = arrivals or "poisson"
    if concurrency is not None and are_stages(concurrency):
        return StagesPlan("concurrency", stages_of("--concurrency", concurrency, whole=True), arrivals, shape)
    if rates is not None and are_stages(rates):
        return StagesPlan("rate", stages_of("--rates", rates, whole=False), arrivals, shape)
    window = 10.0 if window is None else window
    if rates is not None:
        values = () if rates == "auto" else values_of("--rates", rates, whole=False)
    else:
        values = values_of("--concurrency", concurrency, whole=True) if concurrency is not None else ()
    kind = "concurrency" if rates is None else "rate"
    phases = Phases(_SETTLE_SECONDS if settle is None else settle, window)
    return SweepPlan(kind, values, arrivals, shape, phases)
