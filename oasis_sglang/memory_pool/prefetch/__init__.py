"""Worker processes that copy pieces of pages through shared memory while the rank process computes.

    rank process, main thread        rank process, watch thread          worker process, one of several
    ─────────────────────────        ──────────────────────────          ──────────────────────────────
    client.py   Plan, Cancel ──────────────────────────────────────────► worker_loop.py
                Completion   ◄──────────────────────────────────────────   job.py         one plan under way
      ledger.py what is lent                                               piece_copy.py  source ──► target
                                     watch.py       Hello ◄────────────
    supervisor.py ──────────────────►               Stop  ────────────►
      `Workers`, for any thread        process.py   one process

messages.py    what is said over the sockets, and how frames are checked
sockets.py     asking and sending without waiting
settings.py    what a worker is told at its start, and the times that both sides agree on
folder.py      the private folder of the sockets, and removing those of crashed servers
lifeline.py    how a worker ends with its parent
worker.py      the entry point of a worker process

A worker imports neither torch nor SGLang, so nothing that a worker imports may: this file must stay empty of imports.
"""
