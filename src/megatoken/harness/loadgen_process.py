"""LoadGen in a process of its own: ``python -m megatoken.harness.loadgen_process SETTINGS READ_FD WRITE_FD``.

LoadGen accepts one configuration per process, blocks the thread that starts a test, cannot be stopped from outside, and
calls back on that thread at the moment a query is due, for which it needs the interpreter's lock. In a process of its
own nothing else holds the lock, a test is abandoned by killing the process, and any number of tests can follow each
other while the model stays loaded. LoadGen's response ids are addresses in this process and never leave it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatoken.harness.loadgen_wire import ALL_ISSUED, ENDED, FAILED, pack_issued, unpack_answers

SWITCH_SECONDS = 0.0002  # the longest that a due query waits while answers are passed on


class _Answers:
    """Passes answers on to LoadGen; its thread ends the process when the run is gone."""

    def __init__(self, source: Connection) -> None:
        self._source = source
        self._response_ids: dict[int, int] = {}  # by sample
        self._samples = 0

    def add_query(self, response_ids: list[int]) -> None:
        """Numbers the samples of a query."""
        self._response_ids.update(
            zip(range(self._samples, self._samples + len(response_ids)), response_ids, strict=True)
        )
        self._samples += len(response_ids)

    def pass_on(self) -> None:
        """Passes on every message; never returns."""
        try:
            while True:
                self._complete(self._source.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)

    def _complete(self, message: bytes) -> None:
        import mlperf_loadgen as lg

        first, completions, ids = unpack_answers(message)
        ids = np.ascontiguousarray(ids, "<i4")  # LoadGen copies what it keeps inside the call
        if len(first):
            tokens = np.ascontiguousarray(first[:, 1], "<i4")
            address = tokens.ctypes.data
            lg.FirstTokenComplete(
                [
                    lg.QuerySampleResponse(self._response_ids[sample], address + 4 * place, 4)
                    for place, sample in enumerate(first[:, 0].tolist())
                ]
            )
        if len(completions):
            address = ids.ctypes.data
            responses = []
            for sample, output_tokens, count in completions.tolist():
                responses.append(
                    lg.QuerySampleResponse(self._response_ids.pop(sample), address, 4 * count, output_tokens)
                )
                address += 4 * count
            lg.QuerySamplesComplete(responses)


def run(settings: dict[str, Any], source: Connection, sink: Connection) -> None:
    """Runs one test: writes issued samples to ``sink`` and takes answers from ``source``.

    Args:
        settings: ``user_conf``, ``directory``, ``model``, ``scenario`` (LoadGen's names), ``accuracy``, ``seeds``,
            ``library_rows``, ``start_wall_ns`` (null: at once), ``audit_config`` (of a compliance test, else null).
        source: messages of ``pack_answers``.
        sink: messages of ``pack_issued`` and the other kinds.
    """
    import mlperf_loadgen as lg

    test = lg.TestSettings()
    if code := test.FromConfig(settings["user_conf"], settings["model"], settings["scenario"]):
        raise ValueError(f"LoadGen refuses {settings['user_conf']} (code {code})")
    test.scenario = getattr(lg.TestScenario, settings["scenario"])
    test.mode = lg.TestMode.AccuracyOnly if settings["accuracy"] else lg.TestMode.PerformanceOnly
    # The installed LoadGen embeds the seeds of its own round.
    test.qsl_rng_seed, test.sample_index_rng_seed, test.schedule_rng_seed = settings["seeds"]

    logs = lg.LogSettings()
    logs.enable_trace = False
    logs.log_output.outdir = settings["directory"]
    logs.log_output.copy_summary_to_stdout = False

    answers = _Answers(source)

    def issue(response_ids: list[int], rows: list[int]) -> None:
        issued_ns = time.monotonic_ns()
        answers.add_query(response_ids)
        try:
            sink.send_bytes(pack_issued(issued_ns, rows))
        except OSError:  # the run is gone, and LoadGen cannot be stopped otherwise
            os._exit(1)

    rows = settings["library_rows"]
    sut = lg.ConstructFastSUT(issue, lambda: sink.send_bytes(ALL_ISSUED))
    library = lg.ConstructQSL(rows, rows, lambda _: None, lambda _: None)
    threading.Thread(target=answers.pass_on, name="answers", daemon=True).start()
    if settings["start_wall_ns"] is not None:
        time.sleep(max(0, settings["start_wall_ns"] - time.time_ns()) / 1e9)
    # An audit.config in the working directory would override the settings. Without a test, name one that cannot exist.
    audit_config = settings["audit_config"] or settings["user_conf"] + "/audit"
    lg.StartTestWithLogSettings(sut, library, test, logs, audit_config)
    lg.DestroyQSL(library)
    lg.DestroyFastSUT(sut)


def main() -> None:
    """Entry point of the process."""
    sys.setswitchinterval(SWITCH_SECONDS)
    settings, read_fd, write_fd = sys.argv[1:]
    source = Connection(int(read_fd), writable=False)
    sink = Connection(int(write_fd), readable=False)
    try:
        run(json.loads(settings), source, sink)
        sink.send_bytes(ENDED)
    except OSError:
        os._exit(1)  # the run is gone
    except Exception as error:
        sink.send_bytes(FAILED + str(error).encode())
    os._exit(0)  # the other thread still waits for answers


if __name__ == "__main__":
    main()
