"""`qattn serve`."""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import Annotated

import typer

from qattn_hf.cli._common import (
    DeviceOption,
    MethodOption,
    ModelArgument,
    RecipeOption,
    SetOption,
    UsageError,
    chosen_recipe,
)


class LogLevel(str, Enum):
    """What the log has at least: with `info` a line a request."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


NameOption = Annotated[
    str | None, typer.Option(help="Name that requests send as `model`.", show_default="the model's own")
]
BatchingOption = Annotated[
    bool | None,
    typer.Option(
        "--batching/--no-batching",
        help="Serve requests together, by continuous batching over a pool of packed pages, or in turn.",
        show_default="together from transformers 5.23 on",
    ),
]
BlocksOption = Annotated[
    int | None, typer.Option(min=1, help="Blocks of 256 tokens in the pool.", show_default="what memory allows")
]
BatchTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a forward, of all requests.", show_default="8192")
]
KeyOption = Annotated[
    str | None,
    typer.Option(envvar="QATTN_API_KEY", help="Key that clients must send.", show_default="everybody is served"),
]
DtypeOption = Annotated[
    str, typer.Option(help="Precision of the weights, such as bfloat16.", show_default="the checkpoint's")
]


def serve(
    model: ModelArgument = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    served_model_name: NameOption = None,
    batching: BatchingOption = None,
    blocks: BlocksOption = None,
    batch_tokens: BatchTokensOption = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 is a free one.")] = 8000,
    api_key: KeyOption = None,
    max_body_mib: Annotated[int, typer.Option(min=1, help="MiB that the body of a request may have.")] = 4,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that may run or wait at once.")] = 256,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    log_level: Annotated[LogLevel, typer.Option(help="What the log has at least.")] = LogLevel.info,
) -> None:
    """Serve a patched model with OpenAI's API: chat completions and completions (extra `serve`).

    Example: qattn serve MODEL --method turbo, then POST http://localhost:8000/v1/chat/completions
    """
    import logging

    from qattn_hf.server.ports import listening

    if api_key == "":
        raise UsageError("--api-key is empty: give a key, or leave the option and QATTN_API_KEY out")
    sockets = listening(host, port)  # first: a model takes minutes to load
    chosen = chosen_recipe(method, recipe, settings, model)
    try:
        from qattn_hf.server.run import Options, serve
    except ImportError as error:
        raise UsageError(f"the server is not installed ({error}): pip install 'qattn-hf[serve]'") from None
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("qattn_hf", "uvicorn"):
        logging.getLogger(name).setLevel(log_level.value.upper())
    options = Options(
        model=model,
        name=served_model_name,
        batching=batching,
        blocks=blocks,
        batch_tokens=batch_tokens,
        device=device,
        dtype=dtype,
        key=api_key,
        max_body=max_body_mib * 2**20,
        max_requests=max_requests,
    )
    code = serve(chosen, options, sockets)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # a worker may be in the middle of a step, and Python needs seconds to take torch down
