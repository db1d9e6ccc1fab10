"""Tests of study.py: its commands are valid, and its tables say what the metrics do."""
import json
import os

import pytest

import study
from settings import load_config
from train import Config, check_config


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(os.path.dirname(os.path.abspath(study.__file__)))


def test_every_run_is_valid():
    """No study fails after an hour for a misspelt setting; every algorithm has its row."""
    for runs in study.STUDIES.values():
        for words in runs.values():
            cfg, typed, filed = load_config(Config, words)
            assert check_config(cfg, typed, filed) == []
    assert len(study.STUDIES["algorithms"]) == 9


def metrics(values, **more):
    return [{"iter": i, "success": v, "health": "ok", "rollout_s": 1.0, "update_s": 2.0, **more}
            for i, v in enumerate(values, 1)]


def test_tables():
    """By hand: means over seeds with each in brackets, first verdicts, the best of five iterations."""
    ends = [metrics([0.5, 0.5]) for _ in range(2)]
    for lines, success in zip(ends, (0.8, 0.9)):
        lines[-1]["eval/FrozenLakeNoSlip/success"] = success
    assert study.show_algorithms("grpo", ends) == ["grpo", "0.850 (0.800, 0.900)", "6 (6, 6)"]
    fall = metrics([0.2] * 5 + [0.6] * 5 + [0.1] * 5)
    fall[9]["health"], fall[12]["health"] = "warn", "collapse"
    assert study.show_collapse("plain", [fall]) == ["plain", "0.20 (0.20)", "0.60 (0.60)", "0.10 (0.10)", "10", "13"]
    assert study.show_collapse("S", [metrics([0.5] * 9)])[4:] == ["None", "None"]
    keys = ("retrieval_accuracy", "mutual_information", "conditional_entropy")
    template = metrics([0.5, 0.7, 0.9])
    for m, value in ((template[0], 0.75), (template[2], 0.25)):
        m.update({f"template/first/{k}": value for k in keys})
    assert study.show_template("t", [template]) == ["t", *["0.75 (0.75) → 0.25 (0.25)"] * 3, "0.90 (0.90)"]


def test_a_run_that_is_there_is_not_made_again(tmp_path, monkeypatch):
    """metrics.jsonl beside a saved policy is read as it is."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs/study/two_words_7/policy")
    with open("runs/study/two_words_7/metrics.jsonl", "w") as f:
        f.write(json.dumps({"iter": 1}) + "\n")
    assert study.run("two words", ["--no-such-setting"], 7, None) == [{"iter": 1}]
