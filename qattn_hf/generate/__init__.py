"""Run a patched model: `generate`, long prompts, captured decode steps, continuous batching."""
