"""Run several trainings one after the other in one set of processes, since starting them takes longer than they do.

    torchrun --nproc_per_node=2 tests/ranks.py '[["--config", "configs/tiny_bandit.py", ...], ...]' [fault]

fault: "raise" lets rank 1 raise in its second iteration, "hang" lets it sleep there.
"""
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train


def broken(*args, real=train.keep_groups, calls=[0]):
    calls[0] += 1
    if calls[0] == 2 and os.environ["RANK"] == "1":
        if sys.argv[2] == "hang":
            time.sleep(600)
        raise ArithmeticError("rank 1 is out of luck")
    return real(*args)


if __name__ == "__main__":
    if sys.argv[2:]:
        train.keep_groups = broken
    train.script(lambda: max(train.run(words) for words in json.loads(sys.argv[1])))
