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
    """Of these, tokens that an earlier attempt had computed already: the recompute tax. Tokens found cached
    or fetched are not among them."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted sequences (first attempts)."""
    prefix_hit_tokens: int = 0
    """Of these, found cached."""
    fetches: int = 0
    """Fetches from the second tier that ended."""
    fetches_short: int = 0
    """Of these, without all they were to bring."""
    preemptions: int = 0
    preemptions_offload: int = 0
    """Of these, with their blocks kept in the second tier, to be fetched again; the others compute anew."""
    preemptions_urgent: int = 0
    """Of these, for a more urgent newcomer; the others because running sequences needed the blocks."""
    offloaded_tokens: int = 0
    """Tokens whose KV preempted sequences left in the second tier."""
    offload_saved_tokens: int = 0
    """Tokens that these had back from there and did not compute again."""
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
