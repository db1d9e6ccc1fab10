"""StarPO-S on the paper's Sokoban (6x6, one box) with Qwen2.5-0.5B-Instruct and LoRA, one or more GPUs.

    accelerate launch train.py --config configs/sokoban.py

Result, hours and memory: not measured. The paper reports 20.3 % after 200 iterations; uniform random valid
actions reach about 17 % of such tasks and the optimal policy 99 %, so read the normalised score.
"""
model = "Qwen/Qwen2.5-0.5B-Instruct"
env = "Sokoban"
out_dir = "runs/sokoban"

algo = "ppo"                # StarPO-S: critic as baseline, groups filtered, no KL, asymmetric clipping
filter_keep = 0.25          # 2 of 8 groups x 16 = 32 episodes = one step of update_batch 32
lora_rank = 64
lr = 1e-5                   # ten times the full fine-tuning rate, as the paper's LoRA runs
critic_lr = 1e-4
max_iters = 200
