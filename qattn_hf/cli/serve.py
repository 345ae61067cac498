"""`qattn serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from qattn_hf.cli._common import DeviceOption, MethodOption, ModelArgument, RecipeOption, SetOption, chosen_recipe


def serve(
    model: ModelArgument = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    batching: Annotated[
        bool, typer.Option(help="Serve requests together, by continuous batching over one pool of packed pages.")
    ] = True,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of 256 tokens in the pool.", show_default="what memory allows")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a forward, of all requests.", show_default="8192")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    device: DeviceOption = None,
) -> None:
    """Serve a patched model by transformers' own server, whose API is that of OpenAI (extra `serve`).

    Example: qattn serve MODEL --method turbo, then POST http://localhost:8000/v1/chat/completions
    """
    from qattn_hf.continuous.server import start
    from qattn_hf.loading import model_source

    server = start(
        chosen_recipe(method, recipe, settings, model),
        force_model=model_source(model),
        continuous_batching=batching,
        cb_num_blocks=blocks,
        cb_max_batch_tokens=batch_tokens,
        host=host,
        port=port,
        device=device or "auto",
    )
    try:
        server._thread.join()
    except KeyboardInterrupt:
        server.kill_server()
