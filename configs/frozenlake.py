"""StarPO-S on the paper's FrozenLake with Qwen2.5-0.5B-Instruct and LoRA, one or more GPUs.

    accelerate launch train.py --config configs/frozenlake.py

Result, hours and memory: not measured. The paper reports 21.8 % after 200 iterations; uniform random valid
actions reach about 21 % of such tasks and the optimal policy 50 %, so read the normalised score.
"""
model = "Qwen/Qwen2.5-0.5B-Instruct"
env = "FrozenLake"          # p 0.8, every direction of three with probability 1/3
out_dir = "runs/frozenlake"

algo = "ppo"                # StarPO-S: critic as baseline, groups filtered, no KL, asymmetric clipping
filter_keep = 0.25          # 2 of 8 groups x 16 = 32 episodes = one step of update_batch 32
lora_rank = 64
lr = 1e-5                   # ten times the full fine-tuning rate, as the paper's LoRA runs
critic_lr = 1e-4
max_iters = 200
