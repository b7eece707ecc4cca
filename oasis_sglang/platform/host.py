"""What this process may use of the host: physical cores and memory, under affinity and cgroup limits.

Counts are cores, sizes are bytes. Everything is read from /proc and /sys at call time; a file that is missing or
unreadable means "no limit", because containers and sandboxes differ in what they expose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")
CPU_SYSFS = Path("/sys/devices/system/cpu")

# cgroup v1 writes "no limit" as a huge page-aligned number (about 2**63); anything from 2**60 up is no limit.
_NO_LIMIT = 1 << 60


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _cgroup_dirs(controller: str, root: Path, proc_cgroup: Path) -> Iterator[Path]:
    """Directories whose limits bind this process: its own group and every parent, v2 and v1 alike.

    Inside a container the path in /proc/self/cgroup may name a directory that only the host sees; then only the
    mount's root exists, and it is the container's own group.
    """
    for line in (_read(proc_cgroup) or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # v2
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / controllers, root / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                directory = mount.joinpath(*parts[:depth])
                if directory.is_dir():
                    yield directory


def cpu_quota(root: Path = CGROUP_ROOT, proc_cgroup: Path = PROC_CGROUP) -> float | None:
    """CPUs' worth of time the cgroups allow, or None when unlimited."""
    quotas = []
    for directory in _cgroup_dirs("cpu", root, proc_cgroup):
        v2 = (_read(directory / "cpu.max") or "").split()
        if len(v2) == 2 and v2[0].isdigit():
            quotas.append(int(v2[0]) / int(v2[1]))
        quota, period = _read_int(directory / "cpu.cfs_quota_us"), _read_int(directory / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def usable_cores(root: Path = CGROUP_ROOT, proc_cgroup: Path = PROC_CGROUP, cpu_sysfs: Path = CPU_SYSFS) -> int:
    """Physical cores this process may run on: affinity, one thread per core, capped by the CPU quota; at least 1.

    A second hyper-thread adds nothing to a GEMM, and more threads than cores make every OpenMP barrier wait for a
    thread that is not running.
    """
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = cpu_sysfs / f"cpu{cpu}" / "topology"
        core = _read_int(topology / "core_id")
        cores.add((_read_int(topology / "physical_package_id"), core) if core is not None else cpu)
    quota = cpu_quota(root, proc_cgroup)
    count = len(cores) if quota is None else min(len(cores), int(quota))
    return max(count, 1)


def cgroup_free_memory(root: Path = CGROUP_ROOT, proc_cgroup: Path = PROC_CGROUP) -> int | None:
    """Bytes left under the tightest cgroup memory limit, or None when unlimited.

    The page cache counts as usage in a cgroup but is given back on demand, so the inactive part is added back.
    """
    free = []
    for directory in _cgroup_dirs("memory", root, proc_cgroup):
        for limit_file, usage_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _read_int(directory / limit_file), _read_int(directory / usage_file)
            if limit is None or usage is None or limit >= _NO_LIMIT:
                continue
            stat = dict(line.split(" ", 1) for line in (_read(directory / "memory.stat") or "").splitlines())
            free.append(max(limit - usage + int(stat.get(cache_key, 0)), 0))
    return min(free, default=None)


def available_memory() -> int:
    """Bytes this process can still take: the host's available memory or what its cgroups leave, the smaller."""
    import psutil

    available = int(psutil.virtual_memory().available)
    in_cgroup = cgroup_free_memory()
    return available if in_cgroup is None else min(available, in_cgroup)
