"""The images' files, as far as they can be checked without Docker."""

from __future__ import annotations

import re

import pytest
import yaml

from chairlift.server.configuration.fields import Configuration, variable_of
from tests.docker.tools import DOCKER, ROOT, passes, tool

FILES = ("Dockerfile", "Dockerfile.cuda")
NO_SETTINGS = {"CHAIRLIFT_CACHE", "CHAIRLIFT_DOCKERFILE"}
"""Of all commands; of compose.yaml itself."""


@pytest.mark.parametrize("file", FILES)
def test_hadolint_has_nothing_to_say(file: str) -> None:
    passes(tool("hadolint"), str(DOCKER / file))


@pytest.mark.parametrize("file", FILES)
def test_an_image_has_all_that_the_package_is_built_from(file: str) -> None:
    text = (DOCKER / file).read_text()
    copied = {word for line in re.findall(r"^COPY (?!--)(.*)$", text, re.M) for word in line.split()[:-1]}
    links = {path.name for path in (ROOT / "src" / "chairlift").iterdir() if path.is_symlink()}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "src", *links}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


@pytest.mark.parametrize("file", [*FILES, "compose.yaml"])
def test_variables_are_settings(file: str) -> None:
    named = set(re.findall(r"\bCHAIRLIFT_[A-Z_]+\b", (DOCKER / file).read_text()))
    settings = {variable_of(name) for name in Configuration.model_fields}
    assert named and named - NO_SETTINGS <= settings


def test_nothing_of_the_stack_can_be_reached_from_elsewhere() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert set(services) == {"chairlift", "prometheus", "grafana"}
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert "build" in service or re.fullmatch(r"[a-z/-]+:v?[0-9]+\.[0-9]+\.[0-9]+", service["image"])


def test_what_compose_mounts_is_there() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    mounts = [volume for service in services.values() for volume in service["volumes"]]
    folders = [mount.partition(":")[0] for mount in mounts if mount.startswith(".")]
    assert folders and all((DOCKER / folder).is_dir() for folder in folders)
    provided = DOCKER / "grafana" / "provisioning"
    for file in provided.rglob("*.yaml"):
        assert yaml.safe_load(file.read_text())["apiVersion"] == 1
    source = yaml.safe_load((provided / "datasources" / "prometheus.yaml").read_text())["datasources"][0]
    assert source["uid"] in (DOCKER / "grafana" / "dashboards" / "chairlift.json").read_text()
