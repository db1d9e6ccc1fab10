"""Before any test module is imported: the project's files are found, and nothing ever asks the network."""
import os
import sys
import tempfile

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"       # transformers reads it once, at its first import
# not beside the code, where hypothesis would put its tables
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(tempfile.gettempdir(), "hypothesis"))
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.chdir(ROOT)      # a user stands at the top of the clone: the configs name assets/tiny


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    """Every test starts at the top of the clone, and leaves its worlds to no other."""
    import envs
    monkeypatch.chdir(ROOT)
    worlds = dict(envs.ENVS)
    yield
    envs.ENVS.clear()
    envs.ENVS.update(worlds)


def pytest_terminal_summary(terminalreporter):
    """Name the slowest case of each fuzzed property (test_fuzz.py)."""
    reports = [r for rs in terminalreporter.stats.values() for r in rs if getattr(r, "when", None) == "call"]
    lines = [f"{r.nodeid.split('::')[-1]}: {text}"
             for r in reports for key, text in r.user_properties if key == "slowest"]
    if lines:
        terminalreporter.section("slowest fuzzed case")
        terminalreporter.write_line("\n".join(lines))
