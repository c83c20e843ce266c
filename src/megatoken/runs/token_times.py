"""``tokens.parquet`` of a run folder: when each token of each sample was seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatoken.files import storage_error

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

TOKENS = "tokens.parquet"
GROUP_TOKENS = 1 << 20  # of a row group: 8 MiB of times


class TokenTimes:
    """Writes the table in parts, so that a run of any length holds at most one of them in memory.

    The file appears under its name when it is complete. Rows: ``sample_id`` int64, ``token_times_ns`` list of int64,
    relative to the start of the run.
    """

    def __init__(self, folder: Path) -> None:
        """Prepares ``tokens.parquet`` in ``folder``; without a row there will be no file."""
        self._folder = folder
        self._draft = folder / f".{TOKENS}.tmp"
        self._ids: list[int] = []
        self._times: list[NDArray[np.int64]] = []
        self._held = 0
        self._writer: pq.ParquetWriter | None = None

    def add(self, sample_id: int, times_ns: NDArray[np.int64]) -> None:
        """Adds a sample: its tokens' times in nanoseconds since the start of the run [tokens]. Raises StorageError."""
        self._ids.append(sample_id)
        self._times.append(times_ns)
        self._held += len(times_ns)
        if self._held >= GROUP_TOKENS:
            self._write()

    def close(self) -> None:
        """Completes the file. Raises StorageError."""
        if self._ids:
            self._write()
        if self._writer is None:
            return
        try:
            self._writer.close()
            self._draft.rename(self._folder / TOKENS)
        except OSError as error:
            raise storage_error(self._folder / TOKENS, error) from error
        self._writer = None

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        offsets = np.concatenate(([0], np.cumsum([len(times) for times in self._times]))).astype(np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(self._times)))
        table = pa.table({"sample_id": pa.array(self._ids, pa.int64()), "token_times_ns": lists})
        try:
            if self._writer is None:
                # Neighbouring times differ by little, so differences take a fraction of the space.
                encoding = dict.fromkeys(("sample_id", "token_times_ns.list.element"), "DELTA_BINARY_PACKED")
                self._writer = pq.ParquetWriter(
                    self._draft, table.schema, use_dictionary=False, column_encoding=encoding
                )
                if (self._folder / TOKENS).is_file():  # of the part of a run that is resumed
                    for batch in pq.ParquetFile(self._folder / TOKENS).iter_batches():
                        self._writer.write_table(pa.table(batch.to_pydict(), table.schema))
            self._writer.write_table(table)
        except OSError as error:
            raise storage_error(self._folder / TOKENS, error) from error
        self._ids, self._times, self._held = [], [], 0


def read_token_times(folder: Path) -> pa.Table | None:
    """The table of a run folder; None if it has none."""
    import pyarrow.parquet as pq

    file = folder / TOKENS
    return pq.read_table(file) if file.is_file() else None
