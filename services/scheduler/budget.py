"""What a step costs, fitted online, and the token budget and depth of frames that follow from it.

The cost model is `run = fixed + per_decode * decodes + per_token * prefill_tokens`, a least-squares fit over
measured steps in which old ones fade. Errors are weighed relative to the step's length, or the long steps
would decide everything. The announced rates are the first guess and keep a small weight, which also keeps
the fit solvable while only one kind of step is seen.
"""

from dataclasses import dataclass

from shared.wire import StepTiming


@dataclass(frozen=True)
class Cost:
    """Seconds: of an empty step, of one decoding sequence in it, of one prompt token in it."""

    fixed_s: float
    per_decode_s: float
    per_token_s: float

    def step_s(self, decodes: int, prefill_tokens: int) -> float:
        """Seconds of a step with that in it."""
        return self.fixed_s + self.per_decode_s * decodes + self.per_token_s * prefill_tokens


class CostFit:
    """Learns a `Cost` from timings. `prefill_tok_s` and `decode_step_s` are the instance's own claims."""

    KEEP = 0.95
    """Weight an observation keeps with each later one: about the last 20 count."""
    PRIOR_WEIGHT = 1.0
    DECODE_SAMPLE = 8
    """Of pure decode steps, which come by the thousand, one in this many is looked at."""

    OVERRUN_MOST = 0.3
    """A step that took longer still says something about the machine, not about the forecast."""

    def __init__(self, prefill_tok_s: float, decode_step_s: float) -> None:
        step_s = decode_step_s or 0.05
        token_s = 1.0 / prefill_tok_s if prefill_tok_s else 0.002
        # A decode step is mostly weight traffic that all its sequences share.
        self._prior = ((0.8 * step_s), (0.2 * step_s), token_s)
        self.cost = Cost(*self._prior)
        self._aa = [[0.0] * 3 for _ in range(3)]
        self._ay = [0.0] * 3
        self._skipped = 0
        self.decode_tok_s = 0.0
        self.prefill_tok_s = prefill_tok_s
        self.step_s = step_s
        """Length of recent steps, smoothed."""
        self.overrun = 0.03
        """By what share steps with prompts take longer than forecast, on average; shorter ones count as 0."""

    def observe(self, timing: StepTiming) -> None:
        """Take one measured step in. Steps that computed nothing teach nothing."""
        run_s = timing.run_us * 1e-6
        decodes, prefill = timing.decode_tokens, timing.prefill_tokens
        if run_s <= 0.0 or not decodes + prefill:
            return
        self.step_s += 0.1 * (run_s - self.step_s)
        if decodes and prefill:
            beyond = min(max(run_s / self.cost.step_s(decodes, prefill) - 1.0, 0.0), self.OVERRUN_MOST)
            self.overrun += 0.05 * (beyond - self.overrun)
        if not prefill:
            self._skipped += 1
            if self._skipped % self.DECODE_SAMPLE:
                return
            rate = decodes / run_s
            self.decode_tok_s += (0.2 if self.decode_tok_s else 1.0) * (rate - self.decode_tok_s)
        elif prefill >= 16 and prefill > 4 * decodes:
            rate = prefill / run_s
            self.prefill_tok_s += (0.2 if self.prefill_tok_s else 1.0) * (rate - self.prefill_tok_s)
        self._fit(run_s, decodes, prefill)

    def _fit(self, run_s: float, decodes: int, prefill: int) -> None:
        weight = 1.0 / run_s
        row = (weight, decodes * weight, prefill * weight)
        for i in range(3):
            self._ay[i] = self._ay[i] * self.KEEP + row[i]
            for j in range(3):
                self._aa[i][j] = self._aa[i][j] * self.KEEP + row[i] * row[j]
        # One pseudo-observation per coefficient pulls it towards the last known value, relative to its size.
        now = (self.cost.fixed_s, self.cost.per_decode_s, self.cost.per_token_s)
        aa = [line[:] for line in self._aa]
        ay = self._ay[:]
        for i in range(3):
            scale = 1.0 / max(now[i], self._prior[i] * 0.01, 1e-9)
            aa[i][i] += self.PRIOR_WEIGHT * scale * scale
            ay[i] += self.PRIOR_WEIGHT * scale * scale * max(now[i], self._prior[i] * 0.01)
        fixed, decode, token = _solve3(aa, ay)
        self.cost = Cost(max(fixed, 1e-6), max(decode, 0.0), max(token, 1e-7))


def _solve3(a: list[list[float]], y: list[float]) -> tuple[float, float, float]:
    """Cramer's rule; the prior on the diagonal keeps the determinant away from zero."""
    (a00, a01, a02), (a10, a11, a12), (a20, a21, a22) = a
    c0, c1, c2 = a11 * a22 - a12 * a21, a12 * a20 - a10 * a22, a10 * a21 - a11 * a20
    det = a00 * c0 + a01 * c1 + a02 * c2
    y0, y1, y2 = y
    x0 = y0 * c0 + a01 * (a12 * y2 - y1 * a22) + a02 * (y1 * a21 - a11 * y2)
    x1 = a00 * (y1 * a22 - a12 * y2) + y0 * c1 + a02 * (a10 * y2 - y1 * a20)
    x2 = a00 * (a11 * y2 - y1 * a21) + a01 * (y1 * a20 - a10 * y2) + y0 * c2
    return x0 / det, x1 / det, x2 / det


@dataclass(frozen=True)
class BudgetRules:
    """Limits of a step's length, and how far to plan ahead."""

    itl_target_s: float = 0.25
    """Longest gap between tokens that prompts may cause to running sequences, but for one in a hundred."""
    overruns: float = 8.0
    """Steps are planned to end by the target even if they overrun by so many times the average. Of normally
    distributed lengths one in a hundred is beyond 6 times; the way to the client spreads, too."""
    headroom_most: float = 0.5
    """Of the planned length at most: on a machine too uneven for that, prompts still have to get on."""
    step_cap_s: float = 0.5
    """No step is planned longer than this, so that busy and hung differ and a cancel bites."""
    turnaround_s: float = 0.003
    """From an instance's result to its next frame, by NATS and planning; hidden by frames in flight."""
    depth_min: int = 2
    depth_max: int = 16
    prompt_share: float = 0.25
    """Part of a step that prompts may have where decodes alone fill the target, up to the cap."""
    floor_tokens: int = 16
    """Prompt tokens granted whatever decodes take, so that prompts always get on."""

    def prefill_tokens(self, cost: Cost, decodes: int, max_step_tokens: int, overrun: float = 0.0) -> int:
        """Prompt tokens the next step may compute beside `decodes` decoding sequences.

        `overrun` as in `CostFit`.
        """
        used_s = cost.step_s(decodes, 0)
        left_s = self.step_cap_s - used_s
        if decodes:
            target_s = self.itl_target_s / (1.0 + min(self.overruns * overrun, self.headroom_most))
            share_s = used_s * self.prompt_share / (1.0 - self.prompt_share)
            left_s = min(left_s, max(target_s - used_s, share_s))
        tokens = max(int(left_s / cost.per_token_s), self.floor_tokens)
        return min(tokens, max(1, max_step_tokens - decodes))

    def depth(self, step_s: float) -> int:
        """Frames to keep in flight so that the turnaround stays off the critical path."""
        ahead = 1 + int(self.turnaround_s / max(step_s, 1e-6))
        return min(self.depth_max, max(self.depth_min, ahead))

    def refills(self, in_flight: int, step_s: float) -> bool:
        """Whether it is time to issue frames again, up to `depth`.

        A deep window is refilled half at a time: frames, results and tokens of several short steps then
        share their system calls, which cost more than the steps themselves.
        """
        depth = self.depth(step_s)
        return in_flight < (depth if depth <= 3 else depth // 2 + 1)
