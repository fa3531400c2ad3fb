"""Commands under torchrun: one that ranks share, and the refusal of all others."""

from __future__ import annotations

import os

from sfumato.errors import ConfigError


def num_ranks() -> int:
    """How many processes torchrun has started for this command; without it 1."""
    under_torchrun = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", "1")) if under_torchrun else 1


def rank_of_process() -> int:
    """Which of them this one is; 0 without torchrun."""
    return int(os.environ["RANK"]) if num_ranks() > 1 else 0


def refuse_ranks(what: str) -> None:
    """Refuse a command that every process would do again."""
    if num_ranks() > 1:
        raise ConfigError(
            "not-over-ranks",
            f"{what} was started {num_ranks()} times by torchrun.",
            why="Each process would do all of it, and all would write to the same places.",
            fix="Start it without torchrun; sfumato train is what ranks share.",
        )


def helped_first_rank(*, force: bool, dry_run: bool) -> bool:
    """All of ``sfumato train`` on ranks but the first: silent, and without a folder. False on the first."""
    if dry_run:
        refuse_ranks("sfumato train --dry-run")
    if not rank_of_process():
        return False
    from sfumato.run.ranks import joined_ranks, take_part

    with joined_ranks() as ranks:
        take_part(ranks, force=force)
    return True
