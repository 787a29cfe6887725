"""Hunts races: runs the tests of exactness on the sim device again and again, each time with other delays.

    python tests/soak.py MINUTES [--seed FIRST] [arguments of pytest]

Every round prints its seed; `pytest --sim SEED TEST` repeats what it found. Ends with 1 at the first failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
# Whatever compares bits and does not look at what a device itself does.
NAMES = """parity streaming attack_graphs attack_interrupted architectures graphs optimizers precision clipping accumulation activations grads_on_nvme
    partial peft gather heads lifetime"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round; default: the clock")
    args, rest = parser.parse_known_args()
    files = [str(path) for name in NAMES.split() if (path := FOLDER / f"test_{name}.py").exists()]
    started, rounds = time.monotonic(), 0
    while (spent := time.monotonic() - started) < 60 * args.minutes:
        seed = args.seed + rounds
        print(f"soak: round {rounds + 1}, {spent / 60:.1f} of {args.minutes:g} minutes, seed {seed}", flush=True)
        code = subprocess.call([sys.executable, "-m", "pytest", "-q", "-x", "--sim", str(seed), "-p", "no:cacheprovider", *files, *rest])
        if code:
            print(f"soak: seed {seed} failed; repeat with: pytest --sim {seed} -x TEST", flush=True)
            return 1
        rounds += 1
    print(f"soak: {rounds} rounds in {(time.monotonic() - started) / 60:.1f} minutes, seeds {args.seed} to {args.seed + rounds - 1}, no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
