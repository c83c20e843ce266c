"""OpenAI-compatible HTTP in front of an engine: HTTP processes without PyTorch, an engine process, a supervisor."""
