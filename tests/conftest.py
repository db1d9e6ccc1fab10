"""Before any test module is imported: the project's files are found, and nothing ever asks the network."""
import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"       # transformers reads it once, at its first import
# not beside the code, where hypothesis would put its tables
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(tempfile.gettempdir(), "hypothesis"))
sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))


def pytest_terminal_summary(terminalreporter):
    """Name the slowest case of each fuzzed property (test_fuzz.py)."""
    reports = [r for rs in terminalreporter.stats.values() for r in rs if getattr(r, "when", None) == "call"]
    lines = [f"{r.nodeid.split('::')[-1]}: {text}"
             for r in reports for key, text in r.user_properties if key == "slowest"]
    if lines:
        terminalreporter.section("slowest fuzzed case")
        terminalreporter.write_line("\n".join(lines))
