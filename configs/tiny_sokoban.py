"""Sokoban, 6x6 with one box, on a laptop: 2 CPU cores, no GPU, no download."""
model = "assets/tiny"       # about 1 M parameters, made by sft.py on noisy play
env = "Sokoban"
out_dir = "runs/tiny_sokoban"

algo = "grpo"
lora_rank = 0               # so small a model trains all its weights
lr = 3e-4
think = False               # the tiny model answers at once ...
terse = True                # ... and knows the task without the instruction
max_turns = 10              # one action a turn: every move sees the state it starts from
max_actions_per_turn = 1
max_new_tokens = 8
max_context = 1024

prompts_per_iter = 32
group_size = 8
filter_keep = 0.5
update_batch = 128          # all kept episodes in one step
max_iters = 80
