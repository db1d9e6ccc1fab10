"""StarPO-S on the paper's two-armed Bandit with Qwen2.5-0.5B-Instruct and LoRA, one or more GPUs.

    accelerate launch train.py --config configs/bandit.py
    accelerate launch train.py --config configs/bandit.py --env=BanditSafe --out_dir=runs/bandit_safe

Result, hours and memory: not measured. Run the control as well: success on Bandit alone does not show learning,
since filtered and std-normalised groups push towards the risky arm even where it is the worse one.
"""
model = "Qwen/Qwen2.5-0.5B-Instruct"
env = "Bandit"
out_dir = "runs/bandit"

algo = "ppo"                # the critic is a mean baseline here ...
filter_keep = 0.25          # ... but this favours the risky arm: the groups of large spread hold its lucky pulls
lora_rank = 64
lr = 1e-5
critic_lr = 1e-4
max_turns = 1               # one pull
max_actions = 1
max_actions_per_turn = 1
max_iters = 200
