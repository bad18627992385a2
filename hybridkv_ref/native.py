"""The oracle, compiled: its modules and its rows as one extension, built on demand and used when asked for.

``build`` writes the records and rows from the tables (``native_source``), lets mypyc compile them together with the
oracle's own modules, and puts the result into a folder named by all that went into it, so that an extension never
serves other sources, tables or another Python. ``activate`` makes a process use it. What is compiled is the source that
is interpreted otherwise, so it judges alike; a row of other tables, whose text was not compiled, is interpreted.
"""

import hashlib
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR

PACKAGE, ADAPTERS = "hybridkv_ref", "adapters"
VARIABLE = "HYBRIDKV_NATIVE"
"""The environment variable that asks for the compiled oracle where it is 1."""

WRITTEN = {"oracle_entities": "entities", "oracle_compiled": "rows"}
"""The modules that are written from the tables, by the function of ``native_source`` that does so."""

COMPILED = (
    *WRITTEN, "oracle_row", "oracle_records", "oracle_tiers", "oracle_choices", "oracle_state", "oracle_ranks",
    "oracle_hits", "oracle_pins", "oracle_requests", "oracle_blocks", "oracle_index", "oracle_steps",
    "oracle_transfers", "oracle_claims", "oracle",
    f"{ADAPTERS}/vllm_tables", f"{ADAPTERS}/vllm_index", f"{ADAPTERS}/vllm",
)  # fmt: skip
"""The modules that are compiled."""

_SETUP = """
from mypyc.build import mypycify
from setuptools import setup

modules = mypycify({arguments!r}, opt_level="3", debug_level="0", group_name="hybridkv_oracle")
for module in modules:
    module.extra_compile_args = [*module.extra_compile_args, *{flags!r}]
    module.extra_link_args = [*module.extra_link_args, *{flags!r}]
setup(name="hybridkv_oracle", ext_modules=modules)
"""


def home() -> Path:
    """The folder of what is compiled: below the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / PACKAGE / "native"


def key() -> str:
    """A name for all that goes into the extension: every module of the package, the tables, and this Python."""
    whole = hashlib.sha256(f"{sys.implementation.cache_tag} {sysconfig.get_platform()}".encode())
    for root, pattern in ((Path(__file__).parent, "**/*.py"), (SPEC_DIR, "**/*.toml")):
        for path in sorted(root.glob(pattern)):
            whole.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:20]


def build() -> Path:
    """Builds the extension unless it is there, and gives its folder; InputError where it cannot be built."""
    target = home() / key()
    if target.is_dir():
        return target
    if importlib.util.find_spec("mypyc") is None:
        raise InputError("native: mypyc is not installed: pip install 'hybridkv-ref[native]'")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        raise InputError(f"native: there is no C compiler '{compiler}'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"native: {target.parent}: {error.strerror}") from None
    from hybridkv_ref import native_source

    with tempfile.TemporaryDirectory() as place:
        tree = Path(place)
        shutil.copytree(Path(__file__).parent, tree / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        for module, function in WRITTEN.items():
            (tree / PACKAGE / f"{module}.py").write_text(getattr(native_source, function)())
        arguments = ["--ignore-missing-imports", *(f"{PACKAGE}/{name}.py" for name in COMPILED)]
        command = [sys.executable, "setup.py", "-q", "build_ext", "--force", "--build-lib", "built"]
        # The copy is what is compiled, not another checkout that the variable may name.
        environment = {n: v for n, v in os.environ.items() if n not in (VARIABLE, "PYTHONPATH")}
        # Calls into mypyc's own C files are inlined where the linker can; not every compiler has one that does.
        for flags in (["-flto", "-fno-semantic-interposition"], []):
            (tree / "setup.py").write_text(_SETUP.format(arguments=arguments, flags=flags))
            done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=environment)
            if not done.returncode:
                break
        else:
            said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
            raise InputError(f"native: the build failed: {said[-1]}")
        made = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            shutil.copytree(tree / "built", made, dirs_exist_ok=True)
            made.rename(target)
        except OSError as error:
            shutil.rmtree(made)
            # Else another process was faster.
            if not target.is_dir():
                raise InputError(f"native: {target}: {error.strerror}") from None
    return target


def activate() -> None:
    """From here on this process imports the compiled modules; a warning, and the others, where none are built."""
    found = home() / key()
    if not found.is_dir():
        warnings.warn(f"{VARIABLE}=1, and nothing is compiled of these sources: run 'hybridkv native'", stacklevel=2)
        return
    # Not imported by name: this module serves the package while it is being imported.
    for name in (PACKAGE, f"{PACKAGE}.{ADAPTERS}"):
        importlib.import_module(name).__path__.insert(0, str(found.joinpath(*name.split("."))))
    sys.path.append(str(found))


def made() -> str:
    """Whether the oracle of this process is compiled or interpreted, as a word."""
    found = importlib.import_module(f"{PACKAGE}.oracle_steps").__file__
    return "interpreted" if str(found).endswith(".py") else "compiled"
