"""``megatoken qualify`` and ``megatoken doctor``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from megatoken.cli.flags import flag
from megatoken.cli.output import Json, check_folder, counted, print_result
from megatoken.errors import ExitCode, UsageError


def qualify(
    quick: Annotated[
        bool, typer.Option("--quick", help="Run the quick set: about a minute on an idle machine. The default.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Run all tests, longer: a few minutes.")] = False,
    tests: Annotated[str | None, flag("NAME,...", "Run only these tests, and the facts that they need.")] = None,
    baseline: Annotated[
        Path | None, flag("FILE", "Compare with this qualify.json, an earlier qualification of the same machine.")
    ] = None,
    gpus: Annotated[
        str, flag("first|each|together", "GPUs to test: the first, each in turn, or all at the same time.")
    ] = "first",
    rack: Annotated[
        str | None,
        flag("auto|HOST:PORT", "Test every node of this Ray cluster at once, then the network between them."),
    ] = None,
    compare: Annotated[
        str | None,
        flag("azure|FILE", "Place every row of this table of published micro-benchmarks next to our values."),
    ] = None,
    of: Annotated[Path | None, flag("FILE", "Compare this qualify.json, and test nothing.")] = None,
    disk: Annotated[Path | None, flag("DIR", "Folder whose disk is tested. Default: this one.")] = None,
    out: Annotated[
        Path, flag("DIR|FILE.json", "Folder for qualify.json, or a .json file; its HTML page goes next to it.")
    ] = Path("qualify.json"),
    json_only: Json = False,
) -> int:
    """Test whether this machine is healthy. Compares it with bounds, published values and an earlier qualification."""
    from megatoken.hardware.qualify.catalog import SETTINGS, TESTS, choose, device_here
    from megatoken.hardware.qualify.document import read_document
    from megatoken.hardware.qualify.parts import gpus_here, qualify_gpus
    from megatoken.hardware.qualify.processes import start_server
    from megatoken.hardware.qualify.session import exit_code
    from megatoken.hardware.qualify.session import qualify as run

    if of is not None and compare is None:
        raise UsageError("--of: needs --compare; give azure, or a CSV table")
    given = {"--quick": quick, "--full": full, "--tests": tests, "--baseline": baseline, "--rack": rack, "--disk": disk}
    given["--gpus"] = gpus != "first"
    if of is not None and (without := [name for name, value in given.items() if value]):
        raise UsageError(f"--of: compares a stored qualification and tests nothing; leave out {', '.join(without)}")
    if gpus not in ("first", "each", "together"):
        raise UsageError(f"--gpus {gpus}: expected first, each or together")
    if gpus != "first" and device_here() == "cpu":
        raise UsageError(f"--gpus {gpus}: no GPU can be used here; leave out --gpus to test the processor")
    if gpus != "first" and not gpus_here():
        raise UsageError(
            "--gpus: nvidia-ml-py does not list the GPUs; install it, or name them in CUDA_VISIBLE_DEVICES"
        )
    if rack is not None and (without := [name for name in ("--baseline", "--gpus", "--disk") if given[name]]):
        raise UsageError(
            f"--rack: tests nodes and all their GPUs against each other, each in a folder of its own; leave out "
            f"{', '.join(without)}"
        )
    if quick and full:
        raise UsageError("--quick and --full: give one of them")
    device = device_here()
    names = [name.strip() for name in tests.split(",")] if tests is not None else []
    chosen = choose(TESTS[device], names, full=full)
    if disk is not None and not disk.is_dir():
        raise UsageError(f"--disk {disk}: no such folder; name a folder on the disk to test")
    setting = replace(SETTINGS[device][full], folder=disk or Path())
    if out.suffix.lower() != ".json" or out.is_dir():
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out {out}: a file that is no .json; give a folder, or a file such as qualify.json")
        check_folder(out, "a folder, or a file that ends in .json")
        out = out / "qualify.json"
    if baseline is not None and baseline.resolve() == out.resolve():
        raise UsageError(f"--baseline {baseline}: the new result would replace it; give another file with --out")
    if of is None and rack is None:
        start_server()  # it loads PyTorch while this process loads what judges and reports
    from megatoken.analysis.qualify_comparison import compare_with, table_of
    from megatoken.rack.qualify import qualify_rack
    from megatoken.report import check_place, write_document
    from megatoken.report.console import show
    from megatoken.report.documents import checked
    from megatoken.report.earlier import Earlier, set_aside
    from megatoken.report.views import document_view

    check_place(out, "qualify")
    if compare is not None:
        table_of(compare)
    document: dict[str, Any] = {}
    earlier: Earlier | None = None
    try:
        if of is not None:
            document = dict(read_document(of, "--of"))
            stored = checked(document, str(of))
            document_view(stored)  # an error in a field names this file, not the one to be written
            if of.resolve() != out.resolve():
                document["inputs"] = list(dict.fromkeys((str(of), *stored.texts("inputs"))))
        else:
            with counted("tests") as progress:
                common: dict[str, Any] = {"full": full, "baseline": baseline, "progress": progress}
                if rack is not None:
                    more: dict[str, Any] = {"note": lambda text: print(text, file=sys.stderr), "progress": progress}
                    documents = qualify_rack(rack, names, full=full, **more)
                elif gpus == "first":
                    documents = run(chosen, setting, device, **common)
                else:
                    documents = qualify_gpus(
                        chosen, setting, device, gpus_here(), together=gpus == "together", **common
                    )
                for document in documents:
                    earlier = earlier or set_aside(out)
                    _, page = write_document(document, out)
        if compare is not None:
            document["comparison"] = compare_with(document, compare)
            if of is not None and of.resolve() != out.resolve():
                earlier = set_aside(out)
            _, page = write_document(document, out)
    except KeyboardInterrupt:
        if not document:
            raise
        raise KeyboardInterrupt(f"interrupted; the tests that ended are in {out}") from None
    finally:
        if earlier is not None and (kept := earlier.settle(document)):
            print(kept, file=sys.stderr)

    def show_all() -> None:
        show(checked(document, str(out)), full=True)
        print(f"Saved: {out}\nSaved: {page}")

    print_result(document, show_all, json_only=json_only, kept=f"the result is in {out}")
    return exit_code(document)


def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="A run folder, or a sweep's: say why each run was slow.", show_default=False
        ),
    ] = None,
    folder: Annotated[Path | None, flag("DIR", "Folder for runs to examine. Default: this one.", "--out")] = None,
    json_only: Json = False,
) -> int:
    """List what slows this machine or a run, and the fix.

    It changes nothing.
    """
    from megatoken.text import count_of

    if run is not None and folder is not None:
        raise UsageError("--out: the folder for runs to examine; give RUN or --out, not both")
    if run is None:
        from megatoken.hardware.doctor import examine
        from megatoken.runs.seal import refuse_sealed

        document = examine(folder or Path(), refuse_sealed)
    else:
        from megatoken.analysis.diagnosis import diagnosis

        document = diagnosis(run)

    def show() -> None:
        for one in document.get("runs", [document]):
            if "run" in one:
                print(f"{Path(one['run']).name} ({one['verdict']})")
            show_findings(one["findings"])

    def show_findings(findings: list[dict[str, Any]]) -> None:
        for finding in findings:
            if finding["state"] != "OK":
                print(f"{finding['state']:8} {finding['message']}")
                if finding["command"]:
                    print(f"         {finding['command']}")
        fine = [one["code"] for one in findings if one["state"] == "OK"]
        if fine:
            print(f"{'OK':8} {count_of(len(fine), 'check')}: {', '.join(fine)}")

    print_result(document, show, json_only=json_only)
    return ExitCode.OK
