"""``megatoken init``, ``megatoken seal`` and ``megatoken dossier``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatoken.cli.flags import FLAGS, Slo, flag, place
from megatoken.cli.output import Json, Out, deliver
from megatoken.cli.streams import complain, standard_output
from megatoken.errors import ExitCode, UsageError
from megatoken.text import count_of


def dossier(
    ctx: typer.Context,
    audits: Annotated[
        list[Path] | None, flag("AUDIT.json", "Saved audit, or the folder of its --out; repeatable.", "--audit")
    ] = None,
    runs: Annotated[
        list[Path] | None, flag("RUN", "Run folder, or folder of run folders; repeatable.", "--run")
    ] = None,
    slo: Slo = None,
    form: Annotated[
        Path | None, flag("FORM.yaml", "Evidence form. Default: the shipped one, all unknown.", "--form")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every section, not only the first screen.")] = False,
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Put audits, runs and their evidence into one dossier. Page, PDF and JSON document."""
    from megatoken.analysis.lookup import read_runs
    from megatoken.config import load_limits
    from megatoken.dossier import dossier as made
    from megatoken.dossier.form import read_form
    from megatoken.dossier.saved_audit import audit_file, read_audit
    from megatoken.report.pdf import print_page

    asked = load_limits(slo, ctx.meta[FLAGS])
    saved = list({audit_file(path).resolve(): path for path in audits or ()}.values())
    documents = [read_audit(path) for path in saved]
    found = list({run.path.resolve(): run for path in runs or () for run in read_runs(path)}.values())
    inputs = [*map(audit_file, saved), *(run.path for run in found), *filter(None, (slo, form))]
    document = made(documents, found, asked, read_form(form, out), inputs)
    deliver(document, json_only=json_only, out=out, full=full)
    if out is not None:
        printed = print_page(out / f"{document['kind']}.html")
        if printed is None:
            complain("no PDF: no chromium or chrome is installed; print the page from any browser", ExitCode.OK)
        elif not json_only:
            with standard_output(f"the dossier is in {out}"):
                print(f"Saved: {printed}")
    return ExitCode.OK


def seal(
    path: Annotated[Path, place("RUN", "Run folder.")],
    key: Annotated[Path | None, flag("FILE.pem", "Sign with this ed25519 private key.")] = None,
) -> int:
    """Seal a run folder. Writes the hash of every file; megatoken audit then names each that changed."""
    from megatoken.runs.seal import SEAL
    from megatoken.runs.seal import seal as sealed

    document = sealed(path, key)
    with standard_output(f"the seal is {path / SEAL}"):
        by = f", signed by {document['public_key']}" if "public_key" in document else ", not signed"
        print(f"Sealed {count_of(len(document['files']), 'file')}{by}: {path / SEAL}")
    return ExitCode.OK


def init(name: Annotated[str, place("DIR", "Folder to make; files that are there stay unchanged.")]) -> int:
    """Make a workspace: configuration, prompts, limits and claims. Files have comments; an evidence form is added."""
    from megatoken.dossier import workspace

    if not name.strip():
        raise UsageError("init: the name of the folder is empty; give one, or . for the working directory")
    folder = Path(name)
    made = workspace.make_workspace(folder)
    with standard_output(f"the workspace is {folder}"):
        for path, new in made:
            print(f"{'made' if new else 'kept'}  {path}")
        print(f"Next, in {folder}:")
        print(f"  megatoken run {workspace.CONFIG} --slo {workspace.LIMITS}")
        print(f"  megatoken audit runs/RUN --claims {workspace.CLAIMS} --out audit")
        print(
            f"  megatoken dossier --audit audit --run runs/RUN --slo {workspace.LIMITS} --form {workspace.FORM}"
            " --out dossier"
        )
    return ExitCode.OK
