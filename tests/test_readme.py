"""Every command in the README and in docs/ is run by a test or by .ci/run, or needs what neither has: then it says so here."""
import glob
import os
import re
import shutil
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
QUICK = "--max_iters=1 --eval_every=1 --eval_tasks=4 --prompts_per_iter=2 --filter_keep=1"

GPU = "needs a GPU or the hub"
CI = "is in .ci/run"
LONG = "takes long; the script has tests of its own"

# command -> what to add to make it short, or why it isn't run as it stands
HOW = {
    "git clone <this repository> nanoRAGEN && cd nanoRAGEN": CI,
    "pip install -r requirements.txt": CI,
    "pip install -r requirements.txt && accelerate launch train.py --config configs/tiny_frozenlake.py": CI,
    "pip install -r requirements.txt && pytest": CI,
    "accelerate launch train.py --config configs/frozenlake.py": GPU,
    "accelerate launch --multi_gpu --num_processes 4 train.py --config configs/frozenlake.py": GPU,
    **{f"accelerate launch --multi_gpu --num_machines 2 --num_processes 8 --machine_rank {rank} --main_process_ip 10.0.0.1 "
       "--main_process_port 29500 train.py --config configs/frozenlake.py": GPU for rank in (0, 1)},
    "python train.py --config configs/frozenlake.py --dry_run": "--model=assets/tiny",
    'python -c "import envs; [print(n, [envs.success_rate(f, p, range(123, 2171)) for p in (\'random\', \'optimal\')]) '
    'for n, f in envs.ENVS.items()]"': LONG,
    "accelerate launch train.py --config guess.py": QUICK,
    "python train.py --config configs/tiny_frozenlake.py --resume": QUICK,
    "python train.py --config configs/NAME.py --seed=S --out_dir=runs/NAME_S": QUICK,
    "python train.py --config …": LONG,
    "python train.py --help": "",
    "python dryrun.py": "",
    "python sft.py --like=configs/tiny_records.py --model=assets/tiny --noise=0.3 --solver_only=True --steps=300 --lr=1e-3 "
    "--out_dir=runs/records_start": "--steps=2",
    "python train.py --config configs/tiny_records.py --model=assets/tiny --dry_run": "",
    "python train.py --config configs/tiny_records.py": QUICK,
    "pip install gymnasium": LONG,
    "python envs.py FrozenLake --seed 3": "< /dev/null",
    "python eval.py --policy runs/tiny_frozenlake --envs FrozenLakeNoSlip,Sokoban,SokobanNewVocab,LargerSokoban,FrozenLake,Bandit "
    "--out_dir=runs/tiny_frozenlake/eval": "--eval_tasks=4",
    "python eval.py --policy runs/tiny_frozenlake --merge runs/tiny_frozenlake/merged": "",
    "python report.py runs/tiny_sokoban": "",
    "python report.py runs/a_0 runs/a_1 runs/b --out=report.html": "",
    "python study.py algorithms --jobs=2": LONG,
    "python study.py collapse": LONG,
    "python study.py template": LONG,
    "python bench.py --json=bench.json": LONG,
    "python bench.py --only=ideas": LONG,
    "pip install trl gymnasium gym-sokoban": LONG,
    "pytest -m slow -rP tests/test_checkpoint.py tests/test_ranks.py": LONG,
    "pytest -m slow -rP tests/test_fuzz.py": LONG,
}


def commands():
    """Every line of a code block, and every inline code, that is a command, without its comment."""
    found = []
    for path in ["README.md", *sorted(glob.glob("docs/*.md"))]:
        text = open(path).read()
        found += re.findall(r"^    ((?:git|pip|accelerate|python|pytest|torchrun) .*|pytest)$", text, re.M)
        found += re.findall(r"`((?:pip|accelerate launch|python|pytest|torchrun) [^`]+|pytest)`", text)
    return list(dict.fromkeys(re.sub(r"\s+# .*", "", " ".join(c.split("\n"))) for c in found))


def test_every_command_is_accounted_for():
    """None is missing here, none here is missing there."""
    assert sorted(commands()) == sorted(HOW)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder like a clone, with the runs that the commands speak of, each a copy of one short run."""
    root = tmp_path_factory.mktemp("clone")
    for name in os.listdir(ROOT):
        if name != "runs" and not name.startswith("."):
            os.symlink(os.path.join(ROOT, name), root / name)
    text = open(os.path.join(ROOT, "README.md")).read()
    (root / "guess.py").write_text(re.search(r"```python\n(from envs import .*?)```", text, re.S).group(1))
    shell(root, f"python train.py --config configs/tiny_bandit.py {QUICK}")
    for name in ("tiny_frozenlake", "tiny_sokoban", "a_0", "a_1", "b"):
        shutil.copytree(root / "runs/tiny_bandit", root / "runs" / name)
    return root


def shell(root, command):
    command = re.sub(r"^accelerate launch", f"{sys.executable} -m accelerate.commands.launch", command)
    command = re.sub(r"^python ", f"{sys.executable} ", command)
    done = subprocess.run(command, shell=True, text=True, capture_output=True, cwd=root, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("command", [c for c, how in HOW.items() if how not in (GPU, LONG, CI)])
def test_command(clone, command):
    """The command as it stands, with fewer iterations, ends with status 0."""
    words = command.replace("NAME", "tiny_bandit").replace("=S ", "=1 ").replace("_S", "_1")
    if "--resume" in words:
        shutil.rmtree(clone / "runs/tiny_frozenlake", ignore_errors=True)
    shell(clone, f"{words} {HOW[command]}")


def test_the_guide_shows_the_config_and_its_code_runs(capsys):
    """The world in docs/your_own_environment.md is the one of the config, and what it says of it is so."""
    text = open("docs/your_own_environment.md").read()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks[1].strip() in open("configs/tiny_records.py").read()
    exec(blocks[2], {})
    out = capsys.readouterr().out
    assert "{'success': True}" in out
    random, optimal = eval(out.splitlines()[-1])
    assert round(random, 2) in (0.07, 0.08, 0.09) and optimal == 1 and "8 % of the episodes" in text.replace("\n", " ")
