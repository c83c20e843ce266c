"""Published rates against power, recomputed: the documents' efficiency table and the verified rows beside it."""

from __future__ import annotations

from functools import cache

from megatoken.engine.gpus import gpus
from megatoken.planning.assumptions import read_shipped
from megatoken.planning.energy import nameplate_watts, tokens_per_joule, uplift
from megatoken.planning.figures import State, Table, weakest
from megatoken.yaml_files import Strict


class _Row(Strict):
    title: str
    output_tokens_per_second: float
    accelerators: int
    watts: float | None = None
    watts_per_accelerator: float = 0.0
    power_state: State
    state: State
    published_tokens_per_second_per_watt: float | None = None
    source: str

    @property
    def power_watts(self) -> float:
        """As measured, or accelerators x TDP."""
        return self.watts or nameplate_watts(self.accelerators, self.watts_per_accelerator)

    @property
    def efficiency(self) -> float:
        """Output tokens per joule."""
        return tokens_per_joule(self.output_tokens_per_second, self.power_watts)


class _Uplift(Strict):
    of: str
    over: str
    published_share: float | None = None


class _RowsFile(Strict):
    rows: dict[str, _Row]
    uplifts: list[_Uplift]


def efficiency_table() -> Table:
    """Tokens per joule of every reference row, beside what its source prints."""
    rows = [
        {
            "name": name,
            "system": row.title,
            "output_tokens_per_second": row.output_tokens_per_second,
            "state": row.state,
            "power_watts": row.power_watts,
            "power_state": row.power_state,
            "output_tokens_per_joule": row.efficiency,
            "published_output_tokens_per_joule": row.published_tokens_per_second_per_watt,
            "source": row.source,
        }
        for name, row in _file().rows.items()
    ]
    note = "nameplate power is accelerators x TDP: no CPU, network, fan or loss, and no measurement"
    return Table("efficiency", "Published rates over power, recomputed", tuple(rows), note)


def uplift_table() -> Table:
    """What one reference row gains over another, beside what the documents print."""
    known = _file().rows
    rows = []
    for pair in _file().uplifts:
        of, over = known[pair.of], known[pair.over]
        ratio = uplift(of.efficiency, over.efficiency)
        rows.append(
            {
                "of": of.title,
                "over": over.title,
                "ratio": ratio,
                "gain_share": ratio - 1,
                "published_gain_share": pair.published_share,
                "power": of.power_state if of.power_state == over.power_state else "measured against nameplate",
                "state": weakest((of.state, over.state, of.power_state, over.power_state)),
            }
        )
    return Table("uplifts", "Gains in tokens per joule", tuple(rows))


@cache
def tdp_watts() -> dict[str, float]:
    """Watts of every accelerator in ``gpu_specs.csv``, by short name."""
    return {name: gpu.power_limit_watts for name, gpu in gpus().items()}


@cache
def _file() -> _RowsFile:
    return read_shipped("efficiency_rows.yaml", _RowsFile)
