"""Replays seeds: see the package's docstring."""

from __future__ import annotations

import sys

from .run import run


def main(arguments: list[str]) -> int:
    if len(arguments) == 1:
        outcome = run(int(arguments[0]))
        print("\n".join(outcome.told))
        print(f"seed {outcome.seed}: {outcome.foul or 'sound'}")
        return outcome.foul is not None
    first, last = map(int, arguments)
    failed = 0
    for seed in range(first, last):
        outcome = run(seed)
        if outcome.foul is not None:
            failed += 1
            print(f"seed {seed}: {outcome.foul}", flush=True)
    print(f"{last - first} runs, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
