"""
Diagnostics as plain maths: is a run about to collapse, does it still think, and about its prompt?

  EchoTrap                            a verdict for each iteration's metrics: ok, warn or collapse

Nothing here changes a run. v1 is RAGEN, arXiv 2504.20073, v2 is RAGEN-2, arXiv 2604.06268.
"""
import copy
import math


class EchoTrap:
    """
    Tell a run that collapses from one that learns or has learnt (v1 Sec. 4.1: the Echo Trap).

    The signs in their order: the in-group std of returns falls, entropy falls, the gradient norm spikes (the
    point of no return), success falls. A run that solves its task loses std and entropy as well, so they
    count only while success has stopped rising, short of `solved` * `ceiling`.

    ceiling   the best possible success, 1 or the optimal policy's
    warmup    iterations without a verdict; their mean is the early level
    fall      warn where the EMA of std or entropy is under this fraction of its early level
    patience  iterations without a new best success that count as "stopped rising", and iterations of a fallen
              success that count as "lasting"
    solved    no warning from this fraction of the ceiling on
    spike     collapse where the gradient norm is this many times its usual one: the larger of the early level
              and the EMA, both geometric means, so that one spike doesn't hide the next
    drop      collapse where success stays under (1 - drop) * its best
    alpha     weight of the newest value in the EMAs; 0.1 looks back about 10 iterations
    Success is noisy with few prompts an iteration: a fall has to exceed FALL standard errors of its EMA as
    well, which follow from the changes between iterations, a new best RISE.
    The thresholds are ours, set on healthy runs of the tiny model; the papers give the signs, not the numbers
    (v2's early stop: std under 10 % of its first-10 mean for 10 steps).

    >>> trap = EchoTrap(warmup=2)
    >>> [trap.update({"iter": i, "grad_norm": g}) for i, g in enumerate([0.5, 0.6, None, 0.5, 9.0])]
    ['ok', 'ok', 'ok', 'ok', 'collapse']
    >>> trap.first, trap.signs
    ({'warn': None, 'collapse': 4}, ['grad_norm spikes'])
    """
    RISE, FALL = 0.01, 5

    def __init__(self, ceiling: float = 1.0, warmup: int = 10, fall: float = 0.4, patience: int = 15,
                 solved: float = 0.8, spike: float = 10.0, drop: float = 0.25, alpha: float = 0.1):
        self.ceiling, self.warmup, self.fall, self.patience = ceiling, warmup, fall, patience
        self.solved, self.spike, self.drop, self.alpha = solved, spike, drop, alpha
        self.signs = []         # what the last verdict rests on, in words
        self.state = {"ema": {}, "early": {}, "num": {}, "last_success": None, "best": 0.0, "stale": 0,
                      "fallen": 0, "first": {"warn": None, "collapse": None}}

    @property
    def first(self) -> dict:
        """The iteration at which "warn" and "collapse" first fired, or None."""
        return self.state["first"]

    def update(self, metrics: dict) -> str:
        """
        Take an iteration's metrics, return "ok", "warn" or "collapse".

        metrics  iter, success, group_reward_std, entropy, grad_norm; one that is missing, None or not finite
                 (or a gradient of 0: nothing to learn from) says nothing
        """
        s, num = self.state, self.state["num"]
        signs = {"collapse": [], "warn": []}
        values = {key: metrics.get(key) for key in ("group_reward_std", "entropy", "grad_norm", "success")}
        values = {key: x for key, x in values.items() if x is not None and math.isfinite(x)}
        if values.get("grad_norm", 0) > 0:
            x = math.log(values.pop("grad_norm"))
            if num.get("log_grad", 0) >= self.warmup:
                usual = max(s["ema"]["log_grad"], s["early"]["log_grad"])
                if x > usual + math.log(self.spike):
                    signs["collapse"].append("grad_norm spikes")
            self.follow("log_grad", x)
        for key in values.keys() - {"grad_norm", "success"}:
            self.follow(key, values[key])
        if "success" in values:
            self.follow_success(values["success"])
        if s["fallen"] >= self.patience:
            signs["collapse"].append("success has fallen")
        if s["stale"] >= self.patience and s["ema"]["success"] < self.solved * self.ceiling:
            for key in ("group_reward_std", "entropy"):
                if num.get(key, 0) >= self.warmup and s["ema"][key] < self.fall * s["early"][key]:
                    signs["warn"].append(f"{key} is low")
        for level in ("warn", "collapse"):
            if signs[level] and s["first"][level] is None:
                s["first"][level] = metrics.get("iter")
        self.signs = signs["collapse"] + signs["warn"]
        return "collapse" if signs["collapse"] else "warn" if signs["warn"] else "ok"

    def follow(self, key, x):
        """Move the EMA (a plain mean at first) and, during the warm-up, the early level."""
        s = self.state
        num = s["num"][key] = s["num"].get(key, 0) + 1
        ema = s["ema"].get(key, 0.0)
        s["ema"][key] = ema + max(self.alpha, 1 / num) * (x - ema)
        if num <= self.warmup:
            early = s["early"].get(key, 0.0)
            s["early"][key] = early + (x - early) / num

    def follow_success(self, success):
        """Count the iterations since success (its EMA) last rose, and those in a row that it has been low."""
        s = self.state
        if s["last_success"] is not None:
            self.follow("change", (success - s["last_success"]) ** 2)         # on average twice the variance
        s["last_success"] = success
        self.follow("success", success)
        if s["num"]["success"] < max(self.warmup, 2):
            return                                                    # the first means are mere noise
        ema = s["ema"]["success"]
        if ema > s["best"] + self.RISE:
            s["best"], s["stale"] = ema, 0
        else:
            s["stale"] += 1
        error = math.sqrt(s["ema"]["change"] / 2 * self.alpha / (2 - self.alpha))     # of the EMA
        is_low = s["best"] - ema > max(self.drop * s["best"], self.FALL * error)
        s["fallen"] = s["fallen"] + 1 if is_low else 0

    def state_dict(self) -> dict:
        """Copy what a resumed run needs, as plain numbers; the settings are the constructor's."""
        return copy.deepcopy(self.state)

    def load_state_dict(self, state: dict) -> None:
        self.state = copy.deepcopy(state)
