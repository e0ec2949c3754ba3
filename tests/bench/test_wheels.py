"""What is carried to a machine without network."""

from __future__ import annotations

from importlib.metadata import version

from tests.bench.scripts import script

wheels = script("wheels")


def test_all_that_serving_needs_is_there_and_nothing_that_the_machine_has() -> None:
    found = wheels.needed("chairlift", "3.12", ["numpy", *wheels.NOT_FOR_SERVING])
    assert found["fastapi"] == version("fastapi") and found["mlx-lm"] == version("mlx-lm")
    assert found["typing-inspection"] == version("typing-inspection"), "what pydantic needs in turn"
    assert not {"numpy", "pytest", "opentelemetry-sdk", *wheels.NOT_FOR_SERVING} & found.keys()
