"""`chairlift import`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    """Of the weights to write."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    KEEP = "keep"


def import_model(
    file: Annotated[Path, typer.Argument(help="A GGUF file of the llama family.", metavar="FILE.gguf")],
    to: Annotated[
        Path | None, typer.Option(help="Folder to write; the file's name without .gguf by default.")
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Type of the weights. keep: the file's own, quantized where MLX can hold it exactly."
        ),
    ] = Dtype.KEEP,
) -> None:
    """Convert a GGUF file to a model folder."""
    from chairlift.engine.models.gguf import convert_gguf, dtype_named

    folder = convert_gguf(file, to or file.with_suffix(""), dtype_named(dtype), progress=True)
    typer.echo(f"{folder}\nServe it with: chairlift serve --model {folder}")
