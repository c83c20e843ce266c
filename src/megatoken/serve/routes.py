"""Which route answers which method and path. A path that ends in ``/*`` takes any rest of a path."""

from __future__ import annotations

from collections.abc import Mapping

from megatoken.serve.api_routes import API_ROUTES
from megatoken.serve.operation_routes import OPERATION_ROUTES
from megatoken.serve.server import Route

ROUTES: Mapping[tuple[str, str], Route] = {**OPERATION_ROUTES, **API_ROUTES}
