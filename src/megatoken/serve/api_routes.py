"""The routes of OpenAI's API, and of what belongs to it."""

from __future__ import annotations

from megatoken.serve.chat import chat_completions
from megatoken.serve.completions import completions
from megatoken.serve.models import detokenize, model, models, openapi, tokenize
from megatoken.serve.responses import responses

API_ROUTES = {
    ("GET", "/v1/models"): models,
    ("GET", "/v1/models/*"): model,
    ("POST", "/v1/chat/completions"): chat_completions,
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/responses"): responses,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
    ("GET", "/openapi.json"): openapi,
}
