"""Grid barrier between the stages of a persistent kernel, in two halves.

``arrive`` publishes a program's stores and counts it in; ``wait`` holds it until all have arrived.
Loads that do not depend on the barrier are issued between the two. The counter only grows; the
launch's first target comes from ``BASE``, which program 0 moves forward when the launch is done, so
nothing is reset while anyone may be polling. The words belong to one engine's workspace.
"""

from __future__ import annotations

import triton
import triton.language as tl

COUNTER = tl.constexpr(0)
BASE = tl.constexpr(32)  # words apart: a cache line each, so that polls do not slow other words
ERROR = tl.constexpr(64)  # 0, or 1 + the program that ran out of patience first
ERROR_INDEX = tl.constexpr(65)  # the barrier it waited at, counted from the launch's start
JITTER_SINK = tl.constexpr(96)  # counted up by the jitter build to pass time
SYNC_WORDS = 128


@triton.jit
def arrive(
    sync_ptr,  # [SYNC_WORDS] int32
    pid,
    index,  # barriers this launch has passed
    JITTER: tl.constexpr,
):
    """Makes this program's stores visible to all that pass barrier ``index``, and counts it in."""
    if JITTER:
        _idle(sync_ptr, pid, index)
    # Triton 3.5 to 3.8 put no CTA barrier between other warps' stores and the release.
    tl.debug_barrier()
    tl.atomic_add(sync_ptr + COUNTER, 1, sem="release", scope="gpu")
    return index + 1


@triton.jit
def wait(
    sync_ptr,  # [SYNC_WORDS] int32
    base,  # value of the counter when the launch began
    pid,
    index,  # barriers this launch has arrived at
    alive,  # False once a barrier was given up
    spin_limit,
    PROGRAMS: tl.constexpr,
    JITTER: tl.constexpr,
):
    """Waits for every program's ``index``-th arrival; returns False where it gave up.

    After ``spin_limit`` polls it records program and barrier in the error words and returns False;
    a program that has given up once waits at no further barrier.
    """
    target = base + index * PROGRAMS
    left = spin_limit
    # The difference, not the values, is compared: the counter may wrap.
    behind = tl.atomic_add(sync_ptr + COUNTER, 0, sem="acquire", scope="gpu") - target
    while (behind < 0) & (left > 0) & alive:
        behind = tl.atomic_add(sync_ptr + COUNTER, 0, sem="acquire", scope="gpu") - target
        left -= 1
    if (behind < 0) & alive:
        first = tl.atomic_cas(sync_ptr + ERROR, 0, pid + 1, sem="relaxed")
        if first == 0:
            tl.store(sync_ptr + ERROR_INDEX, index)
    tl.debug_barrier()
    if JITTER:
        _idle(sync_ptr, pid, index + 1)
    return alive & (behind >= 0)


@triton.jit
def finish(sync_ptr, base, pid, index, alive, PROGRAMS: tl.constexpr):
    """Moves BASE past this launch's barriers. Every program must have passed one of them."""
    if (pid == 0) & alive:
        tl.store(sync_ptr + BASE, base + index * PROGRAMS)


@triton.jit
def _idle(sync_ptr, pid, index):
    """Spends a time that differs between programs and barriers: brings races to light."""
    turns = 0
    for _ in range((pid * 7 + index * 13) % 11):
        # Each turn waits for the one before: what is added depends on what that one returned.
        turns = tl.atomic_add(sync_ptr + JITTER_SINK, 1 + (turns >> 31), sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["rounds", "spin_limit"])
def barrier_kernel(sync_ptr, rounds, spin_limit, PROGRAMS: tl.constexpr):
    """Passes ``rounds`` barriers and nothing else: what one costs on an idle memory system."""
    pid = tl.program_id(0)
    base = tl.load(sync_ptr + BASE, volatile=True)
    index = 0
    alive = True
    while (index < rounds) & alive:
        index = arrive(sync_ptr, pid, index, False)
        alive = wait(sync_ptr, base, pid, index, alive, spin_limit, PROGRAMS, False)
    finish(sync_ptr, base, pid, index, alive, PROGRAMS)
