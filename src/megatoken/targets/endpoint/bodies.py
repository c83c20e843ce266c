"""From a request to the body that a route of the API takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatoken.datasets.requests import ChatRequest
from megatoken.engine.request import Request
from megatoken.errors import RequestError

Api = Literal["chat", "completions", "responses"]
PATHS: dict[Api, str] = {"chat": "/chat/completions", "completions": "/completions", "responses": "/responses"}
_LONGEST: dict[Api, str] = {"chat": "max_tokens", "completions": "max_tokens", "responses": "max_output_tokens"}


@dataclass(frozen=True, slots=True)
class Asking:
    """How requests are put to a server."""

    model: str  # name to ask for
    forces: bool  # the server knows ``ignore_eos``
    ids: bool  # to ask for the ids of the answer's tokens


def body_of(request: Request, api: Api, asking: Asking, *, stream: bool) -> dict[str, Any]:
    """The body of a request on the route ``api``; ``stream``: its answer comes as a stream.

    Raises:
        RequestError: the route does not take such a prompt.
    """
    body: dict[str, Any] = {"model": asking.model, **_prompt(request, api), _LONGEST[api]: request.max_tokens}
    sampling = request.sampling
    body["temperature"] = sampling.temperature
    if sampling.temperature > 0:
        body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.seed is not None:
            body["seed"] = sampling.seed
    if request.stop:
        body["stop"] = list(request.stop)
    if request.stop_token_ids:
        body["stop_token_ids"] = list(request.stop_token_ids)
    if request.ignore_end_token and asking.forces:
        body["ignore_eos"] = True
    if asking.ids:
        body["return_token_ids"] = True
    if stream:
        body["stream"] = True
        if api != "responses":
            body["stream_options"] = {"include_usage": True}
    return body


def _prompt(request: Request, api: Api) -> dict[str, Any]:
    messages = request.messages if isinstance(request, ChatRequest) else ()
    if api == "completions":
        if messages:
            raise RequestError("messages need the route of chats; give --api chat")
        return {"prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt)}
    if not isinstance(request.prompt, str):
        raise RequestError("token ids need the route of completions; give --api completions")
    chat = [{"role": role, "content": text} for role, text in messages] or [{"role": "user", "content": request.prompt}]
    return {"messages": chat} if api == "chat" else {"input": chat if messages else request.prompt}
