"""Entry point of a worker process: `python -m oasis_sglang.memory_pool.prefetch.worker '<WorkerSettings as JSON>'`."""

from __future__ import annotations

import json
import os
import signal
import sys

from oasis_sglang.memory_pool.prefetch.lifeline import die_with

# A quarter of a core where a thread of the rank process wants the same one; copies take a few hundredths.
NICENESS = 5


def give_way() -> None:
    """Let the rank process go first. Its threads wait for each other many times a step, so one that is interrupted
    stops all, while copies are wanted in the next step only: as `SCHED_BATCH` a worker interrupts nobody when a plan
    wakes it. With a core to spare neither costs anything. More niceness could: on a busy core plans would wait for
    whole steps."""
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(NICENESS)
    except OSError:  # a sandbox may forbid it, and a worker is as good at any priority
        return


def main(argument: str) -> None:
    # Ctrl-C goes to the whole foreground group; the server decides what it means, and its end is the worker's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before the imports, which take long enough for a parent to die in.
    die_with(json.loads(argument)["parent"])
    give_way()

    import logging

    import msgspec

    from oasis_sglang.memory_pool.prefetch.settings import WorkerSettings
    from oasis_sglang.memory_pool.prefetch.worker_loop import WorkerLoop

    settings = msgspec.json.decode(argument, type=WorkerSettings)
    logging.basicConfig(format=f"[%(asctime)s prefetch worker {settings.generation}] %(message)s")
    WorkerLoop(settings).run()


if __name__ == "__main__":
    main(sys.argv[1])
