"""A world of your own, and the config that trains it on a laptop (docs/your_own_environment.md tells the story).

    python sft.py --like=configs/tiny_records.py --model=assets/tiny --noise=0.3 --solver_only=True --steps=300 --lr=1e-3 --out_dir=runs/records_start
    python train.py --config configs/tiny_records.py
"""
from envs import ENVS, TextEnv, stream


class Records(TextEnv):
    instruction = "Send a parcel: look up which carrier its receiver uses, then name that carrier."
    brief = "Records"
    people, carriers = ("Teacher", "Nurse", "Clerk"), ("Phoenix", "Dragon")
    actions = people + carriers

    def reset(self, seed, noise_seed=0):
        task = stream(seed)
        self.receiver = self.people[task.integers(3)]
        self.records = {name: self.carriers[task.integers(2)] for name in self.people}
        self.done, self.read = False, False
        return f"To\n{self.receiver}"

    def step(self, action):
        self.check(action)
        if action in self.people:
            self.read |= action == self.receiver
            return f"{action}\n{self.records[action]}", 0.0, False, False, {"success": False}
        self.done, right = True, self.read and action == self.records[self.receiver]
        return "sent", float(right), True, False, {"success": right}

    def optimal_action(self, actions_left):
        return self.records[self.receiver] if self.read else self.receiver


ENVS["Records"] = Records

model, env, out_dir = "runs/records_start", "Records", "runs/tiny_records"
algo, lora_rank, lr, entropy_coef = "grpo", 0, 2e-4, 0.0
think, terse = False, True
max_turns, max_actions, max_actions_per_turn = 3, 3, 1
max_new_tokens, max_context = 8, 256
prompts_per_iter, group_size, update_batch = 32, 8, 256
filter_keep, filter_zero = 1.0, False
max_iters = 100
