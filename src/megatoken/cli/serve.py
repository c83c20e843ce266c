"""``megatoken serve``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatoken.cli.flags import FLAGS, MODEL_KEYS, Rack, SchemaCommand, flag

if TYPE_CHECKING:
    from megatoken.config import Key


class ServeCommand(SchemaCommand):
    """A command whose other flags are the keys of ``ServeConfig``."""

    def keys(self) -> dict[str, Key]:
        """The keys of ``ServeConfig``."""
        from megatoken.serve.options import KEYS

        return KEYS


def serve(
    ctx: typer.Context,
    model: Annotated[str | None, flag(*MODEL_KEYS["model"])] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on. Default 127.0.0.1.")
    ] = None,
    port: Annotated[str | None, typer.Option(metavar="N", help="Port to listen on. Default 8000; 0: any.")] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY,KEY...", help="Keys that clients must send. Or MEGATOKEN_API_KEY.")
    ] = None,
    engine: Annotated[
        Literal["real", "mock"] | None,
        typer.Option(metavar="real|mock", help="mock: make up tokens, to measure all but the engine."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write log lines as JSON.")] = False,
    random_weights: Annotated[bool, typer.Option("--random-weights", help=MODEL_KEYS["random-weights"][1])] = False,
    precision: Annotated[str | None, flag("fp32|bf16|fp8", MODEL_KEYS["precision"][1])] = None,
    rack: Rack = None,
) -> int:
    """Serve a model over HTTP with OpenAI's API."""
    from megatoken.serve.options import load_serve_config
    from megatoken.serve.supervisor import serve

    declared = {
        "model": model,
        "host": host,
        "port": port,
        "api-key": api_key,
        "engine-kind": engine,
        "json-logs": json or None,
        "random-weights": random_weights or None,
        "precision": precision,
    }
    return serve(load_serve_config(declared | ctx.meta[FLAGS], rack))
