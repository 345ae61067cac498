"""A server of one patched model with the API of OpenAI: chat completions, completions, models, metrics."""
