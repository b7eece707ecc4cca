"""Where KV lives: the host pool (home of every token), the device pool (a bounded cache of pages) and what joins them.

sizing.py        tokens and bytes of both pools, checked against the machine's memory
host_pool.py     every page's K and V, in shared memory, indexed by slot
summaries.py     per page, layer and KV head: smallest and largest key
working_set.py   which logical page each device page holds, per request, layer and KV head
transfer.py      copies pieces of pages from the host pool into the device pool
tier.py          the five above as one object with the operations a forward pass needs
device_pool.py   the device pages as a SGLang KV pool
huge_pages.py    mappings that the processor can translate 2 MiB at a time
shared_memory.py memory that worker processes can map: both pools' on the CPU, the host pool's on a GPU
prefetch/        worker processes that copy pieces through shared memory while the rank process computes
"""
