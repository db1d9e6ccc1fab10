"""DAPO (arXiv 2503.14476) on the laptop lake: token-mean loss, clip-higher, no KL, dynamic sampling.

    accelerate launch train.py --config configs/tiny_dapo.py

Groups without spread are thrown away and the batch is filled up again, with at most two rollouts more.
"""
model = "assets/tiny"
env = "FrozenLakeNoSlip"
out_dir = "runs/tiny_dapo"

algo = "grpo"
refill = 2
filter_keep = 1.0           # all groups ...
filter_zero = False         # ... that have spread
clip_low, clip_high = 0.2, 0.28
kl_coef, entropy_coef = 0.0, 0.0
loss_divisor = "token-mean"
update_batch = 128          # two steps an iteration: clipping can act

lora_rank = 0
lr = 3e-4
think = False
terse = True
max_turns = 10
max_actions_per_turn = 1
max_new_tokens = 8
max_context = 1024
prompts_per_iter = 32
group_size = 8
micro_batch_tokens = 4096
max_iters = 60
