"""The header of a saved cache: its fields with types and bounds, and how its file is read and written."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qattn_hf._version import __version__
from qattn_hf.errors import QAttnError
from qattn_hf.messages import cut, shown
from qattn_kernels.layer.sound import MOST_COLUMNS

FORMAT = 3  # 3 has `InForce` and the conversation's offsets, and lacks the number of used slots
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Tensors = dict[str, torch.Tensor]

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Dtype = Literal["float32", "float16", "bfloat16"]
Text = Annotated[str, Field(max_length=2**18)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Columns = Annotated[int, Field(ge=1, le=MOST_COLUMNS)]
Flags = Annotated[list[bool], Field(max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class HostState(_Strict):
    """Attributes of Transformers' layers (`model_layer.HOST`); lists are indexed by the number of a state."""

    cumulative_length: Columns | None = None
    record_past: bool | None = None
    is_conv_states_initialized: Flags | None = None
    is_recurrent_states_initialized: Flags | None = None
    has_previous_state: Flags | None = None
    conv_kernel_size: Annotated[list[Size | None], Field(max_length=64)] | None = None


class GeometryRow(_Strict):
    """`Geometry` of a packed layer."""

    batch: Size
    heads: Size
    k_dim: Size
    v_dim: Size
    blocks: Annotated[int, Field(ge=1, le=MOST_COLUMNS)]
    dtype: Dtype


class LayerRow(_Strict):
    """A layer: `own` for an unpacked layer; `spec` for a packed one, with sizes if it has tensors."""

    own: dict[str, Any] | None = None
    spec: Text | None = None
    geometry: GeometryRow | None = None
    places: Digest | None = None
    host: HostState


class RopeRow(_Strict):
    """Frequencies of one RoPE of the decoder (`in_force.py`)."""

    attention_scaling: Annotated[float, Field(strict=False)] | None
    inv_freq: Annotated[list[float], Field(max_length=2**16)]


class ModelRow(_Strict):
    """Identity of the model that wrote the cache (`writer.identity`)."""

    config: dict[str, Any]
    dtype: Annotated[str, Field(max_length=32)]
    weights: Digest
    adapters: dict[str, Any]
    rope: dict[str, RopeRow]


class Header(_Strict):
    """All fields of a header."""

    format: int
    qattn: Annotated[str, Field(max_length=100)]
    method: Annotated[str, Field(max_length=100)]
    recipe: Text
    model: ModelRow
    rows: Size
    tokens: Columns
    layers: Annotated[list[LayerRow], Field(min_length=1, max_length=2**14)]
    offsets: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=8)]
    digests: dict[str, Digest]


def unusable(path: str | Path, why: str) -> QAttnError:
    """Return the error for a file in which something does not match."""
    return QAttnError(f"{path} is no cache that a call could have left: {why}. Save the cache anew")


def altered(path: str | Path, what: str) -> QAttnError:
    """Return the error for a file in which a part differs from its digest."""
    return QAttnError(f"{path} was altered after it was saved: {what} has another SHA-256. Save the cache anew")


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Context that opens the safetensors file of a saved cache and checks its header against digest and fields.

    Yields the open file and the header.

    Raises:
        QAttnError: the file is not a complete saved cache, has another format, or cannot be read.
        FileNotFoundError: the file does not exist.
    """
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file") from None
    except (OSError, TypeError, ValueError) as error:  # from a path with NUL
        raise QAttnError(f"{path!r} cannot be read: {error}. Give the path of a file of QAttnCache.save") from None
    if not regular:
        raise QAttnError(f"{path} is no file: give the path of a file of QAttnCache.save")
    try:
        file = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise QAttnError(f"{path} is no whole safetensors file: {error}. Save the cache anew") from None
    with file:
        yield file, _header(path, file.metadata() or {})


def _header(path: str | Path, metadata: dict[str, str]) -> dict[str, Any]:
    text = metadata.get("qattn", "")
    if not text:
        raise QAttnError(f"{path} holds no saved cache: it was not written by QAttnCache.save")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get("sha256"):
        raise altered(path, "its header")
    try:
        header: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unusable(path, f"its header is not JSON ({cut(str(error), 200)})") from None
    if not isinstance(header, dict) or type(header.get("format")) is not int:
        raise unusable(path, "its header names no format")
    if header["format"] != FORMAT:
        raise QAttnError(
            f"{path} has format {cut(str(header['format']), 50)}, of qattn-hf {cut(str(header.get('qattn')), 50)}; "
            f"this is {__version__} with format {FORMAT}. Save the cache anew"
        )
    try:
        Header.model_validate(header)
    except ValidationError as error:
        first = error.errors()[0]
        place = cut(".".join(map(str, first["loc"])), 200)
        raise unusable(path, f"{place} of its header: {cut(first['msg'], 200)}") from None
    except RecursionError:
        raise unusable(path, "its header is nested too deep") from None
    return header


def write(path: str | Path, header: dict[str, Any], tensors: Tensors) -> None:
    """Write the file next to its place and then move it there, so that nobody sees a partial file.

    Raises:
        QAttnError: the file cannot be written there; an existing file is unchanged.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise QAttnError(f"{shown(path)} is no path: give the path of a file to write")
    path = Path(path)
    text = json.dumps(header)
    metadata = {"qattn": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    part = path.parent / f".qattn-{secrets.token_hex(8)}"
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # the umask applies, as for any new file
        try:
            mode = stat.S_IMODE(part.stat().st_mode)
            save_file(tensors, part, metadata)
            part.chmod(mode)  # safetensors may have replaced the file
            os.replace(part, path)
        except BaseException:
            part.unlink()
            raise
    except (OSError, SafetensorError, ValueError) as error:
        raise QAttnError(
            f"{path} cannot be written: {cut(str(error), 500)}. Nothing was changed; give a file in a folder that is "
            "there, on a disk with room"
        ) from error
