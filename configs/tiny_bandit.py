"""Bandit on a laptop: no GPU, no download.

    accelerate launch train.py --config configs/tiny_bandit.py
    accelerate launch train.py --config configs/tiny_bandit.py --env=BanditSafe --out_dir=runs/tiny_bandit_safe

Success on 256 held-out tasks 0.48 -> 1 on Bandit and 0.52 -> 1 on the control, where the other arm is the better one
(mean of 3 seeds), in about 10 seconds each on 2 CPU cores.
"""
model = "assets/tiny"       # about 1 M parameters, made by sft.py on noisy play
env = "Bandit"
out_dir = "runs/tiny_bandit"

algo = "brpo"               # mean over the batch, and no filter: dividing by each group's own spread, or keeping
filter_keep = 1.0           # the groups of large spread, rewards the risky arm for being risky
lora_rank = 0
lr = 3e-4
think = False
terse = True
max_turns = 1               # one pull
max_actions = 1
max_actions_per_turn = 1
max_new_tokens = 8
max_context = 256

prompts_per_iter = 32
group_size = 8
update_batch = 256
max_iters = 40
