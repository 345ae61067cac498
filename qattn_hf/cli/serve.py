"""`qattn serve`."""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import Annotated, Any

import typer

from qattn_hf.cli._common import (
    BatchTokensOption,
    DeviceOption,
    DtypeOption,
    MethodOption,
    ModelArgument,
    RecipeOption,
    SetOption,
    UsageError,
    bytes_of,
    chosen_recipe,
)


class LogLevel(str, Enum):
    """Least severe messages in the log. `info` has one line for each request."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


NameOption = Annotated[str | None, typer.Option(help="Model name in requests.", show_default="the model's name")]
BatchingOption = Annotated[
    bool | None,
    typer.Option(
        "--batching/--no-batching",
        help="Serve requests together (continuous batching over a pool of packed pages), or one after another.",
        show_default="together, from transformers 5.23 on",
    ),
]
BlocksOption = Annotated[
    int | None, typer.Option(min=1, help="Blocks of 256 tokens in the pool.", show_default="what memory allows")
]
KeyOption = Annotated[
    str | None,
    typer.Option(envvar="QATTN_API_KEY", help="Key that clients must send.", show_default="no key"),
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
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0 takes a free port.")] = 8000,
    api_key: KeyOption = None,
    max_body: Annotated[
        Any, typer.Option("--max-body", parser=bytes_of, metavar="SIZE", help="Largest body of a request.")
    ] = "4MiB",
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that run or wait at the same time.")] = 256,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    log_level: Annotated[LogLevel, typer.Option(help="Least severe messages in the log.")] = LogLevel.info,
) -> None:
    """Serve a patched model with OpenAI's API.

    The server answers chat completions and completions, and needs the extra `serve`.

    Example: qattn serve MODEL --method turbo

    Requests then go to http://localhost:8000/v1/chat/completions
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
        max_body=max_body,
        max_requests=max_requests,
    )
    code = serve(chosen, options, sockets)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # a worker may be in the middle of a step, and Python needs seconds to take torch down
