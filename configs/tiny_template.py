"""Template collapse on purpose: a reward that ignores the state, for a model that thinks about it first.

    python study.py template

The model says where it stands and where the goal is before it moves (sft.py taught it). Here every move up pays,
wherever the goal lies: thoughts that don't read the lake are as good as any, and retrieval_accuracy falls.
"""
from envs import ENVS, FrozenLake


class AlwaysUp(FrozenLake):
    def __init__(self):
        super().__init__(p=0.9, slip=0.0)

    def step(self, action):
        observation, _, terminated, truncated, _ = super().step(action)
        return observation, float(action == "Up"), terminated, truncated, {"success": action == "Up"}


ENVS["AlwaysUp"] = AlwaysUp

model = "runs/study/thinker"
env = "AlwaysUp"
out_dir = "runs/tiny_template"

algo = "grpo"
lora_rank = 0
lr = 3e-4
think, terse = True, True
max_turns = 1
max_actions_per_turn = 1
max_new_tokens = 24
max_context = 1024

prompts_per_iter = 32
group_size = 8
filter_keep = 0.5
update_batch = 128
max_iters = 40
eval_every = 0
template_every = 5
template_pairs = 32
