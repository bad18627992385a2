"""What is built and installed: only `hybridkv_ref` at the top level, whole, by wheel, sdist and editable install."""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from build import ProjectBuilder

CHECKOUT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "model_checks", "spec")

# setuptools warns of every editable build that folders of the working directory may come first.
pytestmark = pytest.mark.filterwarnings("ignore:Editable installation")


def run_isolated(python: Path | str, code: str, *arguments: str) -> list[str]:
    """The words that `code` prints; neither the current folder nor PYTHONPATH is on its import path."""
    command = [str(python), "-I", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with what git tracks, or would: no build output, no ignored file; links stay links."""
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    copy = tmp_path_factory.mktemp("source")
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(CHECKOUT / name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def package_files(source: Path) -> set[str]:
    """The files that every distribution must have, by their path in it."""
    folders = ("adapters", "allocator", "conformance", "gpu_check")
    own = ("hybridkv_ref", *(f"hybridkv_ref/{folder}" for folder in folders))
    real = {path.relative_to(source) for folder in own for path in (source / folder).glob("*.py")}
    real |= {Path("hybridkv_ref/py.typed")}
    spec = [("spec", suffix) for suffix in (".toml", ".md", ".jsonl")]
    for folder, suffix in (("kernels", ".py"), ("model_checks", ".py"), *spec):
        found = {"hybridkv_ref" / path.relative_to(source) for path in (source / folder).rglob(f"*{suffix}")}
        real |= found
    return {path.as_posix() for path in real}


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(ProjectBuilder(source).build("sdist", tmp_path_factory.mktemp("sdist")))


@pytest.fixture(scope="module")
def wheels(source: Path, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name: the wheel of the source tree, the one of the unpacked sdist, and the editable one of the source tree."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, unpacked)
    (root,) = unpacked.iterdir()
    return {
        "wheel": Path(ProjectBuilder(source).build("wheel", tmp_path_factory.mktemp("wheel"))),
        "wheel of sdist": Path(ProjectBuilder(root).build("wheel", tmp_path_factory.mktemp("wheel"))),
        "editable": Path(ProjectBuilder(source).build("editable", tmp_path_factory.mktemp("wheel"))),
    }


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_folders_are_relative_links(source: Path) -> None:
    for folder in FOLDERS:
        assert (source / "hybridkv_ref" / folder).readlink() == Path("..", folder)
        assert (source / folder).is_dir()
        assert not (source / folder).is_symlink()


def test_wheel_holds_the_package_and_nothing_else(wheels: dict[str, Path], package_files: set[str]) -> None:
    names = names_in(wheels["wheel"])
    assert {PurePosixPath(name).parts[0] for name in names} == {"hybridkv_ref", "hybridkv_ref-0.1.0.dist-info"}
    assert {name for name in names if name.startswith("hybridkv_ref/")} == package_files
    assert any(name.startswith("hybridkv_ref/spec/kinds/") for name in names)


def test_sdist_holds_the_package_without_the_tests(sdist: Path, package_files: set[str]) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    inside = {PurePosixPath(*PurePosixPath(member.name).parts[1:]) for member in members if member.isfile()}
    assert {path.as_posix() for path in inside if path.parts[0] == "hybridkv_ref"} == package_files
    top = {path.parts[0] for path in inside}
    assert {"pyproject.toml", "LICENSE"} <= top
    assert not top & {"tests", *FOLDERS}


def test_sdist_builds_the_same_wheel(wheels: dict[str, Path]) -> None:
    assert names_in(wheels["wheel of sdist"]) == names_in(wheels["wheel"])


# Where each name would be imported from, then the package's own folders as installed, with what it depends on at hand.
PROBE = """
import importlib.util, pathlib, sys
print(*(name for name in ("kernels", "model_checks", "spec") if importlib.util.find_spec(name)))
sys.path.append(sys.argv[1])
import hybridkv_ref, hybridkv_ref.kernels, hybridkv_ref.model_checks
package = pathlib.Path(hybridkv_ref.__file__).parent
assert package == pathlib.Path(sys.argv[2]), package
assert list((package / "spec" / "kinds").glob("*.toml"))
"""


@pytest.mark.parametrize("name", ["wheel", "editable"])
def test_only_the_package_can_be_imported(name: str, wheels: dict[str, Path], source: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheels[name]) as archive:
        archive.extractall(site)  # what an installer does with a pure wheel, scripts apart
    package = (source if name == "editable" else site) / "hybridkv_ref"
    python = tmp_path / "venv" / "bin" / "python"
    assert run_isolated(python, PROBE, sysconfig.get_path("purelib"), str(package)) == []


def test_metadata(wheels: dict[str, Path]) -> None:
    info = "hybridkv_ref-0.1.0.dist-info"
    with zipfile.ZipFile(wheels["wheel"]) as archive:
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in licence
    assert metadata["Requires-Python"] == ">=3.11"
    assert "hybridkv = hybridkv_ref.cli:main" in scripts
    always = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line for line in always if line.startswith("torch")] == ["torch>=2.6"]
    assert not [line for line in always if line.startswith(("triton", "hypothesis"))]


# The modules among HEAVY that an import brings in: torch takes seconds, and an engine's tests import the oracle.
LOADED = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*({"torch", "z3", "networkx", "hypothesis"} & set(sys.modules)))
"""


def test_importing_the_package_loads_no_heavy_library() -> None:
    for name in ("hybridkv_ref", "hybridkv_ref.oracle", "hybridkv_ref.validate"):
        assert run_isolated(sys.executable, LOADED, name) == []


def test_a_heavy_library_is_noticed() -> None:
    assert run_isolated(sys.executable, LOADED, "networkx") == ["networkx"]
