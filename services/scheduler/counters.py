"""What the core counts, for metrics and tests. Plain numbers; the shell publishes them."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Since the process began."""

    steps: int = 0
    tokens: int = 0
    busy_us: int = 0
    """Time instances spent computing these steps."""
    idle_us: int = 0
    """Time they had nothing to do before them; beside a queue it is our turnaround that shows here."""
    computed_tokens: int = 0
    """Tokens the frames issued so far compute, prompts and decodes, recomputation included."""
    recomputed_tokens: int = 0
    """Of these, tokens that an earlier attempt had computed already: the recompute tax."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted sequences (first attempts)."""
    prefix_hit_tokens: int = 0
    """Of these, found cached."""
    preemptions: int = 0
    requeued: int = 0
    """Sequences sent back because their instance was lost."""
    frames_resent: int = 0
    tokens_frames_resent: int = 0
    stale_refused: int = 0
    """Results and frames of a fenced or former session."""
    queue_full: int = 0
    expired: int = 0
    cancelled: int = 0
    clients_lapsed: int = 0
    instances_lost: int = 0
    takeovers: int = 0
