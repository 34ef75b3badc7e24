"""What every Hydra script does first: its config checked, the commit known, the interpreter set."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf

from experiments.config import Compare, Parity, build
from experiments.log_run import shorten
from triton_mega.record import Git

T = TypeVar("T", Compare, Parity)


@dataclass(frozen=True)
class Start(Generic[T]):
    """What was asked for, and how a record says it."""

    asked: T
    config: dict[str, Any]
    git: Git
    command: str


def begin(cls: type[T], composed: DictConfig, module: str) -> Start[T]:
    """Reads a composed config; exits with code 2 where a value is wrong, saying which.

    Without a GPU, kernels that are defined from here on are interpreted.
    """
    config: Any = OmegaConf.to_container(composed, resolve=True)
    try:
        asked = build(cls, config)
        git = Git.read() if asked.commit is None else Git.parse(asked.commit)
    except ValueError as error:
        print(f"config: {error}", file=sys.stderr)
        sys.exit(2)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    command = shorten(shlex.join(["python", "-m", module, *sys.argv[1:]]))
    return Start(asked, config, git, command)
