"""Plain StarPO, without the three changes that make StarPO-S: the run that the paper sees collapse.

    accelerate launch train.py --config configs/frozenlake_starpo.py

Result, hours and memory: not measured. The paper's PPO collapses after ~100 (Bandit) and ~50 (Sokoban) iterations.
"""
model = "Qwen/Qwen2.5-0.5B-Instruct"
env = "FrozenLake"
out_dir = "runs/frozenlake_starpo"

algo = "ppo"
filter_keep = 1.0           # 1. every group is trained: 128 episodes, four steps of 32
kl_coef = 0.001             # 2. a KL term, in the token reward
clip_high = 0.2             # 3. symmetric clipping
lora_rank = 64
lr = 1e-5
critic_lr = 1e-4
max_iters = 200
