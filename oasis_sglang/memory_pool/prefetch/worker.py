"""Entry point of a worker process: `python -m oasis_sglang.memory_pool.prefetch.worker '<WorkerSettings as JSON>'`."""

from __future__ import annotations

import json
import signal
import sys

from oasis_sglang.memory_pool.prefetch.lifeline import die_with


def main(argument: str) -> None:
    # Ctrl-C goes to the whole foreground group; the server decides what it means, and its end is the worker's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before the imports, which take long enough for a parent to die in.
    die_with(json.loads(argument)["parent"])

    import logging

    import msgspec

    from oasis_sglang.memory_pool.prefetch.settings import WorkerSettings
    from oasis_sglang.memory_pool.prefetch.worker_loop import WorkerLoop

    settings = msgspec.json.decode(argument, type=WorkerSettings)
    logging.basicConfig(format=f"[%(asctime)s prefetch worker {settings.generation}] %(message)s")
    WorkerLoop(settings).run()


if __name__ == "__main__":
    main(sys.argv[1])
