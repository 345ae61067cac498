"""How a patched model runs: `generate`, long prompts, captured steps, continuous batching."""
