"""Does a persistent kernel touch memory that is not its own?

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python -m experiments.memcheck cuda_persistent triton_persistent

API errors are left out: a CUDA binding asks the driver for functions that it may not have.

One launch of two steps for each backend and model, small enough for an instrumented run, with the
results checked as in every comparison. Exit code: 0; 1 if a result is incorrect; 9, by the option
above, if the tool found an error.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from omegaconf import OmegaConf

from experiments.config import CONF, Model, build
from triton_mega.backends import load_backend
from triton_mega.gate import Oracle, check_backend
from triton_mega.weights import random_weights

SPIN_LIMIT = 2**31 - 1
"""Polls at a barrier before a program gives up: instrumented programs keep one another waiting."""

POSITION = 33
STEPS = 2
MAX_POSITIONS = 64


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="One checked launch, for compute-sanitizer.")
    parser.add_argument("backends", nargs="+", metavar="BACKEND")
    parser.add_argument("--models", nargs="+", default=["tiny", "talker_1p7b"], metavar="MODEL")
    asked = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    failed = 0
    for name in asked.models:
        values: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
        model = build(Model, values)
        weights = random_weights(model.spec, model.seed, device)
        oracle = Oracle.build(
            model.spec,
            weights,
            position=POSITION,
            steps=STEPS,
            max_positions=MAX_POSITIONS,
            seed=model.seed,
        )
        for backend in asked.backends:
            made: Any = load_backend(backend)
            options = {"max_positions": MAX_POSITIONS, "spin_limit": SPIN_LIMIT}
            found = check_backend(made(model.spec, weights, **options), oracle).correctness
            verdict = "correct" if found.passed else f"INCORRECT {found.first_divergence or ''}"
            print(f"{backend} {name}: {verdict}, hidden {found.hidden.error:.1e}", flush=True)
            failed += not found.passed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
