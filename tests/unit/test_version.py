"""Only pyproject.toml defines the version; the package, the command line and the changelog agree with it."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest

import proxyccl
from proxyccl.tools.results import versions


@pytest.fixture
def version(pytestconfig: pytest.Config) -> str:
    project = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def test_the_package_reports_the_version_of_the_project(version: str) -> None:
    assert proxyccl.__version__ == version
    assert importlib.metadata.version("proxyccl") == version
    assert versions()["proxyccl"] == version


def test_the_changelog_begins_with_the_version_of_the_project(version: str, pytestconfig: pytest.Config) -> None:
    headings = re.findall(r"^## (\S+) - ", (pytestconfig.rootpath / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version


@pytest.mark.parametrize(
    ("name", "wanted", "before"), [("deep_ep", "proxyccl[torch]", ""), ("nixl", "proxyccl", "1.5.1.")]
)
def test_another_distribution_has_the_version_of_the_project(
    name: str, wanted: str, before: str, version: str, pytestconfig: pytest.Config
) -> None:
    """The version of the distribution `nixl` is NIXL's version, which programs check, followed by ProxyCCL's. The
    combined version has no local part (+...).
    """
    path = pytestconfig.rootpath / "packages" / name / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    assert project["version"] == before + version
    assert re.fullmatch(r"[0-9.]+", project["version"])
    assert project["dependencies"] == [f"{wanted}=={version}"]
