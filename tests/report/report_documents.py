"""Documents of every kind: by the real functions where they need no files, by hand to the same contract elsewhere."""

from typing import Any

from megatoken.analysis.aggregation import aggregate
from megatoken.analysis.comparison import Entry, compare
from megatoken.analysis.nodes import NodeRow
from megatoken.dossier import dossier
from megatoken.dossier.form import read_form

RATES = (62690.8, 62417.3, 61986.5, 59043.8, 61551.6, 62236.9, 61532.7, 59449.4, 62579.9)
RATES += (62451.1, 62317.7, 62593.4, 58081.1, 57718.7, 61331.1, 57599.1, 62563.3, 62803.9)
SECONDS = (4490.47, 4510.15, 4541.50, 4767.85, 4573.60, 4630.93, 4683.93, 4848.05, 4605.54)
SECONDS += (4615.04, 4624.92, 4604.55, 4962.27, 4993.43, 4699.32, 5003.79, 4606.76, 4589.12)
DETAIL = "ND_GB300_v6_1/llama2-70b-99/Offline/mlperf_log_detail.txt"


def head(kind: str, title: str, **values: Any) -> dict[str, Any]:
    """The keys that all documents have, and ``values``."""
    return {
        "kind": kind,
        "schema_version": 1,
        "created_at": "2026-11-20T12:00:00Z",
        "title": title,
        "inputs": ["azure_gb300_1m"],
        "notes": ["an unofficial result <not reviewed>"],
        **values,
    }


def aggregate_document() -> dict[str, Any]:
    """The 18 published nodes."""
    rows = [
        NodeRow(f"ND_GB300_v6_{number}", rate, seconds, samples=1_056_768, accelerators=4, scenario="Offline")
        for number, (rate, seconds) in enumerate(zip(RATES, SECONDS, strict=True), 1)
    ]
    return aggregate(rows, title="18 nodes", inputs=["results"], observations=["pids step by 2,434"]).to_document()


def comparison_document() -> dict[str, Any]:
    """Verified, unverified, measured and estimated rows of different sizes."""

    def entry(name: str, state: str, rate: float, accelerator: str | None, count: int | None, nodes: int, **more: Any):
        subject = {"scenario": "Offline", "model": "llama2-70b", "division": "closed", "precision": "fp4"}
        return Entry(
            name=name,
            source=f"where {name} stands",
            state=state,
            output_tokens_per_second=rate,
            accelerator=accelerator,
            accelerators=count,
            nodes=nodes,
            **{**subject, **more},
        )

    return compare(
        [
            entry("Azure GB200 VM, 5.1-0008", "verified", 52061.6, "NVIDIA GB200", 4, 1, software={"CUDA": "12.9"}),
            entry("ND GB300 v6, 18 VMs", "unverified", 1100948.3, "GB300", 72, 18, software={"CUDA": "13.0"}),
            entry("DGX H100", "verified", 24525.0, "H100-SXM", 8, 1, precision="fp8"),
            entry("Lenovo 8x B200", "verified", 102909.0, "B200-SXM", 8, 1, measured_watts=10401.0),
            entry("H100 rack as the paper says", "estimate", 98000.0, "H100-SXM", 32, 4, division=None),
            entry("own run", "measured", 655.2, None, None, 1, precision="bf16", model="tiny", repeats=(650.0, 660.4)),
        ],
        title="GB300 against what came before",
    ).to_document()


def finding(severity: str, identifier: str, title: str, expected: Any, found: Any, why: str, *lines: int):
    """One finding with its places."""
    where = [{"file": DETAIL, "line": line} for line in lines]
    values = {"id": identifier, "severity": severity, "title": title, "expected": expected, "found": found}
    return {**values, "where": where, "why": why}


def audit_document() -> dict[str, Any]:
    """Findings of every severity, claims with every answer, the nodes."""
    findings = [
        finding(
            "fail",
            "summary-target-qps",
            "Summary and detail log state different target_qps",
            "390, as in the detail log",
            "400",
            "LoadGen writes both from one value, so one file was changed after the run.",
            33,
            71,
        ),
        *(
            finding("pass", "seeds", "Seeds are those of v5.1", "official", "official", "Known seeds.", line)
            for line in range(1, 19)
        ),
        finding("pass", "validity", "LoadGen calls the run VALID", "VALID", "VALID", "", 212),
        finding(
            "warn",
            "dates-missing",
            "Seven kinds of line that every genuine log has are missing",
            ["power_begin", "power_end", "test_datetime"],
            None,
            "Without them nobody can tell whether the nodes ran at the same time.",
        ),
        finding("note", "odd-name", "Odd <name> & 'quotes' \x1b[31m", "plain", "\u202egnp.exe", "Shown harmlessly.", 5),
        finding(
            "unknown",
            "accuracy",
            "No evidence of accuracy",
            "an accuracy run",
            "performance logs only",
            "In this mode LoadGen writes an empty accuracy log; it proves nothing either way.",
        ),
    ]
    claims = [
        {
            "id": "total",
            "text": "1,100,948 tokens/s on one rack",
            "source": "vendor blog, November 2025",
            "answer": "holds",
            "claimed": {"value": 1100948.3, "unit": "tokens/s", "scope": "rack"},
            "recomputed": {"value": 1100948.3, "unit": "tokens/s", "formula": "sum of 18 node rates"},
            "why": "The sum of the nodes' own rates, each over its own time.",
            "evidence_that_would_settle": [],
            "where": [{"file": DETAIL, "line": 300}],
        },
        {
            "id": "single-vm",
            "text": "more than 1.1 million tokens per second on a single VM",
            "source": "news item",
            "answer": "does not hold",
            "claimed": {"value": 1.1e6, "unit": "tokens/s", "scope": "VM"},
            "recomputed": {"value": 62803.9, "unit": "tokens/s", "formula": "the fastest of 18 nodes"},
            "why": "The number of a rack is given to one of its 18 VMs.",
            "evidence_that_would_settle": [],
            "where": [],
        },
        {
            "id": "parallel",
            "text": "all 18 VMs ran in parallel",
            "source": "analyst paper",
            "answer": "cannot be determined",
            "claimed": {"value": 18, "unit": "nodes", "scope": "rack"},
            "recomputed": None,
            "why": "The logs hold no date and no time of day.",
            "evidence_that_would_settle": ["power_begin and power_end of every node"],
            "where": [],
        },
    ]
    artefacts = [
        {
            "path": f"results/ND_GB300_v6_{number}/llama2-70b-99/Offline",
            "node": f"ND_GB300_v6_{number}",
            "scenario": "Offline",
            "mode": "PerformanceOnly",
            "round": "v5.1",
            "loadgen_version": "5.1.0",
            "output_tokens_per_second": rate,
            "duration_seconds": seconds,
            "process_id": 30040 + number,
            "ttft_seconds": {},
        }
        for number, (rate, seconds) in enumerate(zip(RATES, SECONDS, strict=True), 1)
    ]
    counts = {severity: sum(f["severity"] == severity for f in findings) for severity in ("fail", "warn", "note")}
    return head(
        "audit",
        "Audit of azure_gb300_1m",
        findings=findings,
        artefacts=artefacts,
        nodes=aggregate_document()["nodes"],
        aggregate=aggregate_document(),
        claims=claims,
        counts=counts,
    )


def capacity_document() -> dict[str, Any]:
    """The four published rates and what they hide."""
    shapes = {"simple Q&A": (150, 500, 1690.0), "RAG": (1300, 1200, 440.0), "summarisation": (2000, 500, 440.0)}
    shapes |= {"agent, 4 turns": (8000, 2000, 110.0)}
    return head(
        "plan_capacity",
        "Capacity of 1,100,948 tokens/s",
        inputs=[
            {"name": "output rate", "value": 1100948.3, "unit": "tokens/s", "state": "unverified", "source": "blog"}
        ],
        profiles=[
            {"name": name, "input_tokens": prompt, "output_tokens": answer}
            for name, (prompt, answer, _) in shapes.items()
        ],
        results=[
            {
                "name": f"{name}: interactions",
                "value": value,
                "unit": "1/s",
                "formula": "rate / (input + output tokens)",
                "state": "estimate",
            }
            for name, (_, _, value) in shapes.items()
        ],
        tables=[
            {
                "name": "concurrency",
                "title": "What the rate means for users",
                "rows": [
                    {"profile": name, "interactions_per_second": value, "in_flight": value * 12, "users": value * 72}
                    for name, (_, _, value) in shapes.items()
                ],
                "note": "Little's law, 12 s an answer, 60 s to think",
            }
        ],
        sensitivities=[],
    )


def cost_document() -> dict[str, Any]:
    """A cost with its parts and what moves it."""
    parts = {"amortisation": 0.052, "power": 0.0101, "cooling_pue": 0.003, "space": 0.0014, "network_egress": 0.0005}
    return head(
        "plan_cost",
        "Cost of a million output tokens",
        inputs=[
            {"name": "rack price", "value": 3.9e6, "unit": "$", "state": "assumed", "source": "reseller's page"},
            {"name": "power price", "value": 0.1, "unit": "$/kWh", "state": "assumed", "source": "statistics office"},
        ],
        profiles=[],
        results=[
            {
                "name": "cost per million output tokens",
                "value": sum(parts.values()),
                "unit": "$",
                "formula": "dollars per hour / tokens per hour x 10^6",
                "state": "estimate",
            }
        ],
        waterfall={
            "title": "Parts of the cost",
            "unit": "$ per million output tokens",
            "total": "All parts",
            "steps": [{"name": name, "value": value, "state": "assumed"} for name, value in parts.items()],
        },
        tables=[],
        sensitivities=[
            {"input": "utilisation", "low": 0.3, "high": 0.9, "result_low": 0.156, "result_high": 0.052},
            {"input": "rack_price", "low": "2.9 M$", "high": "4.9 M$", "result_low": 0.0537, "result_high": 0.0803},
            {"input": "pue", "low": 1.05, "high": 1.6, "result_low": 0.0661, "result_high": 0.0721},
        ],
    )


def energy_document() -> dict[str, Any]:
    """Efficiencies, measured and by nameplate."""
    rows = {"H100": (4.375, "nameplate"), "GB200": (10.01, "nameplate"), "8x B200, Lenovo": (9.89, "measured")}
    return head(
        "plan_energy",
        "Tokens per joule",
        inputs=[{"name": "pue", "value": 1.2, "unit": "W/W", "state": "assumed", "source": "round figure"}],
        profiles=[],
        results=[
            {"name": name, "value": value, "unit": "tokens/J", "formula": "rate / power", "state": state}
            for name, (value, state) in rows.items()
        ],
        tables=[],
        sensitivities=[],
    )


def repeats_document() -> dict[str, Any]:
    """Four runs of one setting, of which one was cut off."""
    rates = [4405.2, 4398.7, 4411.9]
    return head(
        "repeats",
        "Repeats of server llama2-70b fp8",
        verdict="INTERRUPTED",
        verdicts=["VALID", "VALID", "MEASURED", "INTERRUPTED"],
        runs=["001", "002", "003", "004"],
        runs_wanted=5,
        runs_in_the_mean=["001", "002", "003"],
        metrics={
            "output_tokens_per_second": {
                "values": rates, "mean": 4405.3, "geometric_mean": 4405.3, "low": 4388.9, "high": 4421.7
            },
            "energy_joules_per_output_token": {
                "values": [0.15, 0.151, 0.152], "mean": 0.151, "geometric_mean": 0.151, "low": None, "high": None
            },
        },
        percentiles={"loadgen_ttft_p99_seconds": {"values": [1.2, 1.31, 1.25]}},
        confidence=0.95,
        interval_formula="mean ± t(1 - (1 - confidence) / 2; n - 1) · s / √n",
        seeds={"qsl": 1780908523862526354},
        seeds_note="Every repeat has the same seeds.",
    )  # fmt: skip


def dossier_document() -> dict[str, Any]:
    """The audit above by a limit that no run is judged by, and the form as it ships."""
    asked = {"limits": {"output_tokens_per_second": 1e6}}
    return dossier([audit_document()], [], asked, read_form(None))


DOCUMENTS = {
    "repeats": repeats_document,
    "audit": audit_document,
    "dossier": dossier_document,
    "aggregate": aggregate_document,
    "comparison": comparison_document,
    "plan_capacity": capacity_document,
    "plan_cost": cost_document,
    "plan_energy": energy_document,
}
