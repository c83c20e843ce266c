"""Servers that speak OpenAI's API over HTTP, as a target: client processes, what their answers show, the address."""
