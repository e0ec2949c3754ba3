"""What weights will take, from headers alone."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from chairlift.engine.memory.weights import WeightBytes, weight_bytes


def test_the_projection_is_what_the_arrays_take(tmp_path: Path) -> None:
    half = {"a": mx.zeros((3, 5), mx.bfloat16), "scale": mx.zeros((7,), mx.float16)}
    codes = {"codes": mx.zeros((4, 4), mx.uint32)}
    mx.save_safetensors(str(tmp_path / "model-1.safetensors"), half)
    mx.save_safetensors(str(tmp_path / "model-2.safetensors"), codes, metadata={"format": "mlx"})
    stored = sum(array.nbytes for array in (*half.values(), *codes.values()))
    assert weight_bytes(tmp_path, None) == WeightBytes(stored, stored)
    cast = sum(array.astype(mx.float32).nbytes for array in half.values()) + codes["codes"].nbytes
    assert weight_bytes(tmp_path, "float32") == WeightBytes(cast, cast + stored)
    assert weight_bytes(tmp_path, "bfloat16") == WeightBytes(stored, stored)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 16,
        (8).to_bytes(8, "little") + b"[1, 2]  ",
        (12).to_bytes(8, "little") + b'{"a": {}}   ',
    ],
)
def test_what_is_no_such_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="^model.safetensors is no safetensors file"):
        weight_bytes(tmp_path, None)
