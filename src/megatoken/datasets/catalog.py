"""MLPerf's data sets for language models: what their files contain, and how to get them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from megatoken.errors import DatasetError
from megatoken.yaml_files import load_yaml

FOLDER = Path("datasets")

Role = Literal["tokens", "token_count", "text", "reference", "metric"]
Algorithm = Literal["md5", "sha256"]
Sums = Mapping[Algorithm, str]  # checksums of one file, hexadecimal


class MlperfDataSet(BaseModel):
    """One data set; ``mlperf_datasets.yaml`` explains the fields at its head."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    benchmarks: tuple[str, ...]
    file: str
    file_format: Literal["pickle", "json"]
    rows: int
    columns: Mapping[Role, str]
    max_input_tokens: int | None
    max_new_tokens: int
    tokenizer: str
    sums: Sums
    sums_source: str
    get: str
    unpack: str | None = None
    calibration_file: str
    calibration_rows: int
    source: str

    def how_to_get(self, place: Path) -> str:
        """One line: the command that fetches the file, and that it belongs at ``place``."""
        unpack = f", unpack it with {self.unpack}" if self.unpack else ""
        return f"get it with `{self.get.format(folder=place.parent)}`{unpack} and put it at {place}"

    def to_document(self, folder: Path) -> dict[str, Any]:
        """Plain JSON, with the files of it that ``folder`` has."""
        place = folder / self.file
        return {
            **self.model_dump(mode="json", exclude={"get"}),
            "how_to_get": self.how_to_get(place),
            "found": [str(path) for path in (place, place.with_suffix(".parquet")) if path.exists()],
        }


@cache
def catalog() -> Mapping[str, MlperfDataSet]:
    """The data sets by name."""
    text = files("megatoken").joinpath("data", "mlperf_datasets.yaml").read_text(encoding="utf-8")
    entries = load_yaml(text)["data_sets"]
    return {name: MlperfDataSet(name=name, **entry) for name, entry in entries.items()}


def missing(path: Path) -> DatasetError:
    """The error for a missing file; if it has the name of an MLPerf file, with the way to get it."""
    for entry in catalog().values():
        if path.name == entry.file:
            return DatasetError(f"{path}: no such file; it is MLPerf's {entry.name} data set: {entry.how_to_get(path)}")
    return DatasetError(f"{path}: cannot be read: No such file or directory; give the path of a data file")
