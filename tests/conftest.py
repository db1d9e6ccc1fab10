"""Before any test module is imported: the project's files are found, and nothing ever asks the network."""
import os
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"       # transformers reads it once, at its first import
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    """Stand at the top of the clone, as a user: the configs name assets/tiny. No test leaves its worlds to the next."""
    import envs
    monkeypatch.chdir(ROOT)
    worlds = dict(envs.ENVS)
    yield
    envs.ENVS.clear()
    envs.ENVS.update(worlds)
