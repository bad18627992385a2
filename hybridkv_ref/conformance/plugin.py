"""The pytest plugin: options, one run for all tests of the suite, and the report at the end.

It is loaded in every run of pytest in which this package is installed, so it imports nothing until it is asked to.
Under xdist one worker runs the histories and the others wait for what it found.
"""

import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hybridkv_ref.conformance.records import Report

FOLDER = "hybridkv_folder"
RESULT = "result.json"
SUITE = "test_rules.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suite."""
    group = parser.getgroup("hybridkv", "conformance of KV cache engines (hybridkv_ref)")
    group.addoption("--hybridkv-engine", metavar="MODULE:FACTORY", help="the engine to test; or exec:COMMAND")
    group.addoption("--hybridkv-profile", default="quick", metavar="NAME", help="quick, ci or deep (default: quick)")
    group.addoption("--hybridkv-report", metavar="DIR", help="writes JSON, Markdown, a badge and traces to DIR")
    group.addoption(
        "--hybridkv-known-gaps", default="", metavar="IDS", help="rules known to be broken: ID,ID or @FILE, one a line"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the engine at once, so that a wrong word of the command line is a usage error."""
    path = config.getoption("--hybridkv-engine")
    if path is None:
        return
    from hybridkv_ref.conformance.loading import load_engine, load_gaps, load_profile
    from hybridkv_ref.errors import InputError

    try:
        session = Session(config)
        session.gaps = load_gaps(config.getoption("--hybridkv-known-gaps"))
        session.profile = load_profile(config.getoption("--hybridkv-profile"))
        session.engine = load_engine(path)
    except InputError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[KEY] = session
    config.pluginmanager.register(session, "hybridkv-session")


class Session:
    """The run of one pytest process: of the only one, of a worker, or of the controller that writes the report."""

    engine: Any
    profile: Any
    gaps: tuple[str, ...]

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        given = getattr(config, "workerinput", {}).get(FOLDER)
        self.worker = given is not None
        self.folder = Path(given or tempfile.mkdtemp(prefix="hybridkv-"))
        self.known: Report | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a worker of xdist where the others look."""
        node.workerinput[FOLDER] = str(self.folder)

    def report(self) -> "Report":
        """What the run found; the first to ask runs it."""
        if self.known is None:
            from hybridkv_ref.conformance.run import conform

            with (self.folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (self.folder / RESULT).exists():
                    import msgspec

                    found = conform(self.engine, self.profile, self.config.getoption("--hybridkv-profile"), self.gaps)
                    written = self.written(found)
                    (self.folder / RESULT).write_bytes(msgspec.json.encode(written))
            self.known = self.read()
        if self.known is None:
            raise RuntimeError(f"{self.folder / RESULT}: not written")
        return self.known

    def written(self, found: "Report") -> "Report":
        """The report with its files; traces go to the folder of --hybridkv-report, else to one that stays."""
        from hybridkv_ref.conformance.report import with_traces, write

        chosen = self.config.getoption("--hybridkv-report")
        if chosen:
            return write(found, Path(chosen))
        if not any(v.found for v in found.rules.values()):
            return found
        return with_traces(found, Path(tempfile.mkdtemp(prefix="hybridkv-traces-")))

    def read(self) -> "Report | None":
        """The report if some process has written it."""
        if not (self.folder / RESULT).exists():
            return None
        import msgspec

        from hybridkv_ref.conformance.records import Report

        return msgspec.json.decode((self.folder / RESULT).read_bytes(), type=Report)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The verdict, and a command for each thing that went wrong."""
        report = self.read()
        if report is None:
            return
        terminalreporter.section(f"hybridkv: {report.engine}: {report.verdict}")
        told = set()
        for verdict in report.rules.values():
            if verdict.found is not None and verdict.found.replay not in told:
                told.add(verdict.found.replay)
                terminalreporter.line(verdict.found.replay)
        if report.error:
            terminalreporter.line(f"the engine failed: {report.error}")
        if report.open:
            terminalreporter.line(f"claimed and not shown: {', '.join(report.open)}")
        terminalreporter.line(
            f"{report.examples} histories, {report.operations:,} operations, {report.events:,} events, "
            f"{report.rows_fired:,} rows, {report.seconds:.1f} s"
        )

    def pytest_unconfigure(self) -> None:
        """Ends the engine's process, and removes what the workers shared."""
        close = getattr(self.engine, "close", None)
        if callable(close):
            close()
        if not self.worker:
            shutil.rmtree(self.folder, ignore_errors=True)


KEY = pytest.StashKey[Session]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the suite without an engine are a mistake of the command line."""
    here = Path(__file__).with_name(SUITE)
    if KEY not in config.stash and any(item.path == here for item in items):
        raise pytest.UsageError("hybridkv_ref.conformance: name an engine with --hybridkv-engine MODULE:FACTORY")


@pytest.fixture(scope="session")
def hybridkv_report(request: pytest.FixtureRequest) -> "Report":
    """What the run of the suite found."""
    return request.config.stash[KEY].report()
