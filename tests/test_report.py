"""Tests of report.py: what it gathers by hand-worked numbers, and its page in a real headless Chromium."""
import doctest
import json
import os
import re
import shutil

import pytest

import report
import train
from settings import UserError, load_config

ROOT = os.path.dirname(os.path.abspath(report.__file__))
EVIL = "</think><!--<script></script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
LAKE = {"env": "FrozenLakeNoSlip", "algo": "grpo", "lr": 1e-3}


# ---------------------------------------------------------------------------------------------- runs written by hand

def lake_episode(group, success, thought="go", fed="<think>", **changes):
    """One turn on a lake whose goal stands in column `group`, as record.py writes it."""
    grid = "\n".join(("P___", "_O__", "____", "".join("G" if i == group % 4 else "_" for i in range(4))))
    said = f"{thought}</think><answer>Down</answer>"
    return {"iter": 1, "env": "FrozenLakeNoSlip", "group": group, "member": 0, "success": success,
            "return": float(success), "turn_rewards": [float(success)], "format_ok": [True], "actions": [["Down"]],
            "truncated": False, "messages": [{"role": "user", "content": f"FrozenLake\n{grid}\n10"},
                                            {"role": "assistant", "content": "<think>" + said}],
            "segments": [[f"<|user|>FrozenLake\n{grid}\n10<|assistant|>{fed}", False], [said + "<|end|>", True]], **changes}


def write_run(path, metrics, config=LAKE, **files):
    """A run's folder; files: iter_000001=[episodes], ..."""
    os.makedirs(path / "rollouts")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    for name, lines in {"metrics": metrics, **{f"rollouts/{k}": v for k, v in files.items()}}.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def some_metrics(iterations, **more):
    """Lines like train.py's, evaluated at first and at last; iteration 0 holds nothing else."""
    held_out = lambda x: {f"eval/FrozenLakeNoSlip/{k}": v for k, v in (("success", x), ("random", 0.2), ("optimal", 1.0))}
    lines = [{"iter": i, "success": 0.5, "traj_return": 0.5, "entropy": 1 / i, "grad_norm": 0.1, "approx_kl": 0.0,
              "kl_ref": None, "response_len": 3.0, "thought_words": 4.0, "rollout_s": 1.0, "health": "ok", "time_s": 2.0 * i,
              **more} for i in range(1, iterations + 1)]
    lines[-1] |= held_out(0.75)
    return [{"iter": 0, **held_out(0.25)}, *lines]


# ---------------------------------------------------------------------------------------------- gathering

def test_doctests():
    failed, tried = doctest.testmod(report)
    assert tried >= 4 and failed == 0


def test_nothing_a_model_wrote_ends_the_script(tmp_path):
    """The page has as many script elements as its template, and its JSON says what the model wrote, to the letter."""
    run = write_run(tmp_path / "run", some_metrics(1), eval_000001=[lake_episode(0, True, EVIL)])
    page = report.page(report.gather([run]))
    template = open(os.path.join(ROOT, "assets", "report.html")).read()
    assert page.lower().count("<script") == template.lower().count("<script") == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))
    said = data["runs"][0]["files"][0]["episodes"][0]["turns"][0]["said"]
    assert "".join(text for text, _, _ in said) == "<think>" + EVIL + "</think><answer>Down</answer><|end|>"


def test_seeds_of_one_config_are_one_line(tmp_path):
    """By hand: mean, lowest and highest over the seeds that have a value; other settings make another line."""
    runs = [write_run(tmp_path / f"lake_{seed}", [{"iter": 1, "entropy": x}, {"iter": 2, "entropy": y}],
                      {**LAKE, "seed": seed, "out_dir": f"runs/lake_{seed}"})
            for seed, (x, y) in enumerate([(0.5, None), (0.25, 0.5), (0.75, float("nan"))])]
    runs.append(write_run(tmp_path / "other", [{"iter": 1, "entropy": 1.0}], {**LAKE, "lr": 1e-4, "grad_clip": float("inf")}))
    data = report.gather(runs)
    assert [(line["name"], line["runs"]) for line in data["lines"]] == [
        ("lake", ["lake_0", "lake_1", "lake_2"]), ("other", ["other"])]
    assert [line["differ"] for line in data["lines"]] == [
        {"lr": 1e-3}, {"lr": 1e-4, "grad_clip": "Infinity"}]         # for which JSON in a browser has no number
    chart, = [chart for chart in data["charts"] if chart["key"] == "entropy"]
    assert chart["series"] == [
        {"line": 0, "x": [1, 2], "mid": [0.5, 0.5], "low": [0.25, 0.5], "high": [0.75, 0.5], "n": [3, 1]},
        {"line": 1, "x": [1], "mid": [1.0], "low": [1.0], "high": [1.0], "n": [1]}]


def test_thinning_keeps_every_spike(tmp_path):
    """10,000 iterations become at most 2,000 points, the first spike and the first dip among them, and the page says so."""
    lines = [{"iter": i, "grad_norm": 50.0 if i == 4321 else 0.01 if i == 8888 else 1.0} for i in range(1, 10_001)]
    data = report.gather([write_run(tmp_path / "run", lines)])
    series = data["charts"][0]["series"][0]
    assert len(series["x"]) <= report.MOST_POINTS and series["x"] == sorted(series["x"])
    assert {4321, 8888} <= set(series["x"]) and max(series["mid"]) == 50 and min(series["mid"]) == 0.01
    assert data["notes"] == ["curves are thinned from 10,000 iterations to at most 2,000 points: the lowest and the highest "
                             "of each stretch"]


def test_large_rollouts_are_thinned(tmp_path, monkeypatch):
    """The first and the last evaluation stay, whatever their size, and the page says how much is left out."""
    monkeypatch.setattr(report, "MOST_BYTES", 20_000)
    files = {f"eval_{i:06d}": [lake_episode(k, True, "word " * 200) for k in range(4)] for i in range(0, 50, 5)}
    data = report.gather([write_run(tmp_path / "run", some_metrics(1), **files)])
    kept = data["runs"][0]["files"]
    assert [f["iter"] for f in kept] == [0, 45] and len(json.dumps(kept)) < 10_000
    assert data["notes"] == [f"run: {sum(len(f['episodes']) for f in kept)} of 40 sample episodes are on this page, all are "
                             "in its rollouts/"]


def test_grids_are_found():
    """Both vocabularies of Sokoban, the lake, a grid inside a long message; never mere text, a short or ragged one."""
    find = lambda text, env: report.split_grid(text, report.legend(env, {}))[1]
    assert find("Sokoban\n#####\n#P_X#\n#__O#\n#####\n10", "Sokoban") == ["#####", "#P_X#", "#__O#", "#####"]
    assert find("-0.1\nWWWWW\nWA.BW\nW..GW\nWWWWW\n9", "SokobanNewVocab") == ["WWWWW", "WA.BW", "W..GW", "WWWWW"]
    assert find("Turn 1:\nState:\n√___\n_O__\n____\nYou have 9 actions left.", "FrozenLake") == ["√___", "_O__", "____"]
    for text in ("Arms: Phoenix, Dragon", "PPP\n___", "P__\n____\n___", "P_\n__\n_G", "P_1\n___\n__G"):
        assert find(text, "FrozenLake") == []
    assert find("PPP\nPPP\nPPP", "Bandit") == []            # a world of words
    assert report.legend("OnlyInThatRun", {}) is None


@pytest.mark.parametrize("content, fed, said, given", [
    ("<answer>Up</answer>", "<|user|>x<|assistant|><answer>", "Up</answer><|end|>", "<answer>"),
    ("<think>a</think>", "…<think>\n", "a</think><|end|>", "<think>"),      # opened by the template, with a line break
    ("<answer>", "…<answer>", "<|end|>", "<answer>"),                         # nothing but the stop token
    ("answered", "…", "answered<|end|>", ""),
    ("<answer>Up", "…<answer>", " Up<|end|>", ""),                            # decoded otherwise: nothing is claimed
])
def test_prefill_is_told_from_the_sampled(content, fed, said, given):
    assert report.prefill(content, fed, said) == given


def test_trained_text_is_exactly_the_segments(tmp_path):
    """On a real run of two iterations: fed and trained text of a page's turns, joined, are the segments of the file."""
    cfg, _, _ = load_config(train.Config, tiny_words(tmp_path / "run"))
    train.main(cfg)
    data = report.gather([str(tmp_path / "run")])
    files = {(f["kind"], f["iter"]): f["episodes"] for f in data["runs"][0]["files"]}
    assert set(files) == {("iter", 1), ("iter", 2), ("eval", 0), ("eval", 1), ("eval", 2)}
    for (kind, i), episodes in files.items():
        lines = (tmp_path / "run" / "rollouts" / f"{kind}_{i:06d}.jsonl").read_text().splitlines()
        for record, e in zip(map(json.loads, lines), episodes, strict=True):
            parts = [(turn["fed"], "".join(text for text, _, trained in turn["said"] if trained)) for turn in e["turns"]]
            assert [text for pair in parts for text in pair] == [text for text, _ in record["segments"]]
            assert all(turn["said"][0] == ["<answer>", "tag", False] for turn in e["turns"])
            assert all(len(turn["told"][1]) == 4 for turn in e["turns"])
            assert [turn["reward"] for turn in e["turns"]] == record["turn_rewards"]


def tiny_words(out):
    return ["--config=configs/tiny_frozenlake.py", f"--out_dir={out}", "--max_iters=2", "--eval_every=1", "--eval_tasks=4",
            "--prompts_per_iter=2", "--log_rollouts_every=1"]


def test_an_older_run_and_a_killed_one(tmp_path):
    """No config, no segments, no actions, a torn last line, a repeated iteration: what is there is shown."""
    old = lake_episode(1, False)
    for key in ("segments", "actions", "env", "return"):
        del old[key]
    run = tmp_path / "run"
    write_run(run, [{"iter": 1, "success": 0.1}, {"iter": 1, "success": 0.2}], None, iter_000001=[old])
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"iter": 2, "succ')
    data = report.gather([str(run)])
    assert [chart["key"] for chart in data["charts"]] == ["success"] and data["charts"][0]["series"][0]["mid"] == [0.2]
    assert data["notes"] == [f"{run}/metrics.jsonl: 1 unreadable line(s) left out"]
    turn, = data["runs"][0]["files"][0]["episodes"][0]["turns"]
    assert turn["fed"] is None and turn["actions"] is None and turn["reward"] == 0
    assert turn["said"] == [["<think>", "tag", None], ["go", "thought", None], ["</think>", "tag", None],
                            ["<answer>", "tag", None], ["Down", "answer", None], ["</answer>", "tag", None]]


def test_facts_and_verdicts(tmp_path):
    """By hand: first and last evaluation, seconds, and the stretches of warnings."""
    lines = some_metrics(6)
    for m, (level, signs) in zip(lines[3:], [("warn", ["entropy is low"])] * 2 + [("collapse", ["grad_norm spikes"])]):
        m |= {"health": level, "health_signs": signs}
    data = report.gather([write_run(tmp_path / "run", lines)])
    assert data["lines"][0]["facts"] == [["success on FrozenLakeNoSlip", "0.250 → 0.750", "random 0.200; optimal 1"],
                                         ["iterations", "6", ""], ["time", "12 s", ""],
                                         ["Echo Trap", "warn at 3, collapse at 5", ""]]
    assert data["traps"] == [{"line": 0, "run": "run", "spans": [["warn", 3, 4, "entropy is low"],
                                                                 ["collapse", 5, 5, "grad_norm spikes"]]}]


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    """What a user can mend says what to do, and nothing is written."""
    run = write_run(tmp_path / "run", some_metrics(1))
    other = write_run(tmp_path / "other", some_metrics(1))
    write_run(tmp_path / "empty", [])
    for words, what in (([], "required: runs"), ([str(tmp_path)], "holds no run"), ([str(tmp_path / "empty")], "no iteration"),
                        ([run, other], "--out"), ([run, run, "--out=x.html"], "named twice"),
                        ([run, "--out=metrics.jsonl"], ".html"), ([run, f"--out={tmp_path}/no/x.html"], "No such file"),
                        ([run, "--colour"], "--colour")):
        with pytest.raises(UserError, match=what) as error:
            report.main(words)
        assert "\n" not in str(error.value)
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".html")]
    report.main([run])
    out = capsys.readouterr().out
    assert os.path.isfile(os.path.join(run, "report.html")) and f"wrote {run}/report.html, 0.0 MB: open it" in out


# ---------------------------------------------------------------------------------------------- the page, in a browser

@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A headless Chromium, Debian's, or a skip that says what is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install selenium)")
    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in paths:
        pytest.skip("Chromium is not installed (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
                 "disable-component-update", "disable-sync", "disable-dev-shm-usage",
                 f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(paths[1]))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """{name: path of a page}: two configs of two seeds with everything that may go wrong, an old run, a real one."""
    root = tmp_path_factory.mktemp("pages")
    thoughts = {0: "The goal lies below me, and there is a hole beside it. " * 8, 1: EVIL, 2: "x" * 400, 3: ""}
    runs = []
    for k in range(4):
        metrics = some_metrics(40, health="collapse" if k == 1 else "ok", health_signs=["success has fallen"])
        evaluations = {f"eval_{i:06d}": [lake_episode(g, g < i // 10, thoughts[g]) for g in range(4)] for i in (0, 20, 40)}
        two = [lake_episode(g, g == 0, truncated=g == 1, member=g) for g in range(3)] + [
            {**lake_episode(0, True), "env": "Bandit", "messages": [{"role": "user", "content": "Arms: A, B"},
                                                                    {"role": "assistant", "content": "<think>A"}]}]
        runs.append(write_run(root / f"a_run_with_a_rather_long_name_{'ab'[k // 2]}_{k % 2}", metrics,
                              {**LAKE, "lr": 1e-3 * (1 + k // 2), "seed": k}, iter_000010=two, **evaluations))
    old = write_run(root / "old", [{"iter": 1, "success": 0.5}], None)
    out = {"many": str(root / "many.html"), "old": os.path.join(old, "report.html")}
    report.main([*runs, f"--out={out['many']}"])
    report.main([old])
    cwd = os.getcwd()
    os.chdir(ROOT)
    try:
        train.main(load_config(train.Config, tiny_words(root / "real"))[0])
    finally:
        os.chdir(cwd)
    report.main([str(root / "real")])
    return out | {"real": str(root / "real" / "report.html")}


@pytest.fixture
def open_page(chromium, pages):
    """Open a page at a width; afterwards, no error may stand in the console and nothing may have been requested."""
    def open_it(name, width=1280, dark=False):
        size = dict(width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]})
        chromium.get("file://" + pages[name])
        return chromium
    for kind in ("browser", "performance"):
        chromium.get_log(kind)      # what earlier tests left
    yield open_it
    assert chromium.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert asked and all(url in {"file://" + path for path in pages.values()} | {"data:,"} for url in asked), asked


def data_of(driver):
    return driver.execute_script("return DATA")


def texts(driver, selector):
    return driver.execute_script("return [...document.querySelectorAll(arguments[0])].map(x => x.textContent)", selector)


def choose(driver, element_id, value):
    driver.execute_script("const x = document.getElementById(arguments[0]); x.value = arguments[1];"
                          "x.dispatchEvent(new Event('change'))", element_id, value)


@pytest.mark.parametrize("name", ["many", "old", "real"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_draws_at_every_width(open_page, name, width):
    """Every chart has a curve for each of its lines, inside the picture; no page scrolls sideways, even on a phone."""
    driver = open_page(name, width)
    charts = data_of(driver)["charts"]
    drawn = driver.execute_async_script("""const done = arguments[0]; requestAnimationFrame(() => setTimeout(() => done(
        [...document.querySelectorAll(".chart")].map(c => [...c.querySelectorAll("path.curve")].map(p => [
            p.getAttribute("d"), p.getBBox().x >= 0 && p.getBBox().x + p.getBBox().width <= c.clientWidth]))), 100))""")
    assert len(drawn) == len(charts) > 0
    for chart, curves in zip(charts, drawn):
        assert [len(d.split("L")) for d, _ in curves] == [len(s["x"]) for s in chart["series"]]
        assert all(re.fullmatch(r"M[\d.,L-]+", d) and inside for d, inside in curves)
    too_wide = driver.execute_script("""const found = [];
        for (const view of ["turns", "tokens"])
            for (const select of document.querySelectorAll("#task, #compare-task"))
                for (const option of select.options) {
                    document.querySelector(`[value=${view}]`).click();
                    select.value = option.value;
                    select.dispatchEvent(new Event("change"));
                    document.querySelectorAll("details").forEach(details => details.open = true);
                    if (document.documentElement.scrollWidth > innerWidth) found.push([view, select.id, option.value]);
                }
        return found""")
    assert too_wide == []


def test_seeds_bands_levels_and_marks(open_page):
    """A band where there are several seeds, random and optimal beside the evaluation, the Echo Trap's stretch below."""
    driver = open_page("many")
    assert [line["name"][-2:] for line in data_of(driver)["lines"]] == ["_a", "_b"]
    held_out = '[data-key="eval/FrozenLakeNoSlip/success"] '
    assert len(driver.find_elements("css selector", held_out + "path.band")) == 2
    assert texts(driver, held_out + ".level-name") == ["random 0.2", "optimal 1"]
    assert len(driver.find_elements("css selector", held_out + "rect.collapse")) == 1
    assert "Echo Trap: collapse" in texts(driver, "#legend")[0] and "Echo Trap: warn" not in texts(driver, "#legend")[0]


def test_reading_a_value_by_keyboard_and_pointer(open_page):
    """The arrow keys and the pointer move one cursor over all charts; each says its value at that iteration."""
    from selenium.webdriver import ActionChains, Keys
    driver = open_page("many")
    entropy = driver.find_element("css selector", '[data-key="entropy"] svg')
    entropy.send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * 4)
    assert driver.find_element("id", "at").text.startswith("iteration 4 · collapse: success has fallen (a_run_")
    assert texts(driver, '[data-key="entropy"] .values span') == ["0.25", "0.25"]           # 1 / 4
    assert entropy.get_attribute("aria-valuetext").startswith("iteration 4: ")
    assert len(driver.find_elements("css selector", ".chart .cursor")) == len(data_of(driver)["charts"])
    entropy.send_keys(Keys.ESCAPE)
    assert driver.find_elements("css selector", ".chart .cursor") == []
    ActionChains(driver).move_to_element(entropy).perform()
    middle = int(re.match(r"iteration (\d+)", driver.find_element("id", "at").text).group(1))
    assert 17 <= middle <= 22           # of 0 to 40, with a margin on the left


def test_filters(open_page):
    """The episodes to choose from are those of the file, the world and the outcome, as the JSON counts them."""
    driver = open_page("many")
    run = data_of(driver)["runs"][0]
    for file in run["files"]:
        choose(driver, "file", f"{file['kind']}_{file['iter']}")
        for env in dict.fromkeys(e["env"] for e in file["episodes"]):
            choose(driver, "world", env)
            here = [e for e in file["episodes"] if e["env"] == env]
            for outcome in ("all", "success", "failure"):
                driver.execute_script("document.querySelector(`input[value=${arguments[0]}]`).click()", outcome)
                wanted = [e for e in here if outcome == "all" or e["success"] == (outcome == "success")]
                assert len(driver.find_elements("css selector", "#task option")) == len(wanted)
                assert texts(driver, "#count") == [f"{len(wanted)} of {len(here)} episodes"]
                shown = texts(driver, "#episode .outcome b")
                assert shown == [("✓ success" if wanted[0]["success"] else "✗ failure")] if wanted else shown == []
    assert any(e["env"] == "Bandit" for f in run["files"] for e in f["episodes"])


def test_the_same_task_side_by_side(open_page):
    """Both sides show the chosen task at their own iteration, at first one that was learnt between them."""
    driver = open_page("many")
    grids = "return [...document.querySelectorAll(`[data-side=${arguments[0]}] .world`)].map(x => x.ariaLabel)"
    assert texts(driver, "#beside .outcome b") == ["✗ failure", "✓ success"]
    for task, early, late in (("2", "20", "40"), ("3", "0", "40"), ("1", "40", "0")):
        for name, value in (("left", early), ("right", late), ("compare-task", task)):
            choose(driver, name, value)
        evaluations = {str(f["iter"]): f for f in data_of(driver)["runs"][0]["files"] if f["kind"] == "eval"}
        shown = [driver.execute_script(grids, side) for side in ("left", "right")]
        goal = "".join("G" if i == int(task) else "_" for i in range(4))
        assert shown[0] == shown[1] == [f"grid P___ / _O__ / ____ / {goal}"]
        assert texts(driver, "#beside .outcome b") == [
            "✓ success" if evaluations[i]["episodes"][int(task)]["success"] else "✗ failure" for i in (early, late)]


def test_model_text_is_text(open_page):
    """Markup that a model wrote is shown to the letter, as trained text, and runs nowhere."""
    driver = open_page("many")
    choose(driver, "compare-task", "1")
    trained = "".join(texts(driver, "[data-side=left] .said .trained"))
    assert trained == EVIL + "</think><answer>Down</answer><|end|>"
    assert texts(driver, "[data-side=left] .said .fed") == ["<think>"]
    assert driver.execute_script("return [window.hacked, document.images.length]") == [None, 0]


def test_tokens_and_turns_of_a_real_run(open_page, pages):
    """The tokens' view is the segments of the file, with the trained ones marked; the turns' view draws every grid."""
    driver = open_page("real")
    rollouts = os.path.join(os.path.dirname(pages["real"]), "rollouts")
    for line in map(json.loads, open(os.path.join(rollouts, "eval_000000.jsonl"))):
        choose(driver, "file", "eval_0")
        choose(driver, "task", str(line["group"]))
        driver.execute_script("document.querySelector('[value=turns]').click()")
        assert len(driver.find_elements("css selector", "#episode .world")) == len(line["turn_rewards"])
        assert len(driver.find_elements("css selector", "#episode .world .cell")) == 16 * len(line["turn_rewards"])
        driver.execute_script("document.querySelector('[value=tokens]').click()")
        assert texts(driver, "#episode .text") == ["".join(text for text, _ in line["segments"])]
        trained = [text for text, is_trained in line["segments"] if is_trained]
        assert "".join(texts(driver, "#episode .trained")) == "".join(trained)


def test_dark_and_light(open_page):
    """The page follows the system's scheme."""
    light, dark = (open_page("real", dark=d).execute_script("return getComputedStyle(document.body).backgroundColor")
                   for d in (False, True))
    assert light == "rgb(251, 250, 248)" and dark == "rgb(20, 22, 26)"


def test_controls_have_names(open_page):
    """Every control can be reached by keyboard and says what it is."""
    driver = open_page("many")
    controls = driver.find_elements("css selector", "select, input, button, svg[tabindex]")
    assert len(controls) > 20
    for control in controls:        # one that offers no choice is hidden, and has none
        assert control.accessible_name or not control.is_displayed(), control.get_attribute("outerHTML")
