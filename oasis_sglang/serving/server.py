"""One SGLang server as a context manager."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import requests

HOST = "127.0.0.1"
START_TIMEOUT = 300.0  # seconds; most of a start is imports, and a busy machine takes several times longer
STOP_TIMEOUT = 15.0


class ServerFailed(RuntimeError):
    """The server did not come up; the message carries the end of its log."""


def oasis_flags(config: Mapping[str, Any] | None = None, device_tokens: int | None = None) -> list[str]:
    """Launch flags that turn the backend on, with `device_tokens` as the bound of its device pool."""
    flags = ["--kv-backend", "oasis"]
    if config:
        flags += ["--oasis-config", json.dumps(dict(config))]
    if device_tokens is not None:
        flags += ["--max-total-tokens", str(device_tokens)]
    return flags


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # A port in TIME_WAIT is free: uvicorn sets the same option.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


class Server:
    """`python -m sglang.launch_server` in a process group of its own.

    Entering the context starts the server and waits until it generates; leaving it stops the whole group, whatever
    happened in between. Everything the server prints goes to `log_path`.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        log_path: str | os.PathLike[str] | None = None,
        start_timeout: float = START_TIMEOUT,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self.model_path = str(model_path)
        self.args = list(args)
        self.env = dict(env or {})
        self.port = port or free_port()
        if log_path is None:
            handle, log_path = tempfile.mkstemp(prefix=f"sglang-{self.port}-", suffix=".log")
            os.close(handle)
        self.log_path = Path(log_path)
        self.start_timeout = start_timeout
        self.on_wait = on_wait
        self.process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "sglang.launch_server",
            "--model-path", self.model_path, "--host", HOST, "--port", str(self.port),
            *self.args,
        ]  # fmt: skip

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        if not port_is_free(self.port):
            raise ServerFailed(f"port {self.port} is in use; stop what listens there or choose another port")
        _leave_cleanly_on_termination()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.log_path.open("wb")
        self._log.write(f"$ {shlex.join(self.command)}\n".encode())
        self._log.flush()
        self.process = subprocess.Popen(
            self.command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self.env},
            start_new_session=True,  # one group to signal, and Ctrl-C in the terminal is ours to handle
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        started = time.monotonic()
        while (waited := time.monotonic() - started) < self.start_timeout:
            if (code := self.process.poll()) is not None:
                raise ServerFailed(f"the server exited with code {code} while starting{self._log_excerpt()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health_generate", timeout=30).status_code == 200:
                    return
            if self.on_wait is not None:
                self.on_wait(waited)
            time.sleep(0.5)
        raise ServerFailed(f"the server was not ready after {self.start_timeout:.0f} s{self._log_excerpt()}")

    def _log_excerpt(self, lines: int = 15) -> str:
        """The error that ended the server, if its log names one, else the log's last lines."""
        written = self.log().splitlines()
        errors = [line for line in written if re.match(r"\w+(Error|Exception): ", line)]
        return f". Its log, {self.log_path}, says:\n  " + "\n  ".join(errors[-1:] or written[-lines:])

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def stop(self) -> None:
        """Idempotent. SIGTERM lets SGLang remove its shared memory and sockets; SIGKILL follows for what stays."""
        if self.process is not None:
            group = self.process.pid
            self.resume()
            if _signal_group(group, signal.SIGTERM):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_TIMEOUT)
            _signal_group(group, signal.SIGKILL)  # workers outlive a launcher that died
            self.process.wait()
            _wait_for_group(group)
            self.process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def pause(self) -> None:
        """Stop every process of the server where it stands, so that it uses no core while another is measured."""
        if self.process is not None:
            _signal_group(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self.process is not None:
            _signal_group(self.process.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        """Resume for the length of a block, then pause again."""
        self.resume()
        try:
            yield self
        finally:
            self.pause()

    def resident_bytes(self) -> int:
        """Resident set of the server's processes together (Linux); shared pages are counted once per process."""
        if self.process is None:
            return 0
        total = 0
        for pid in _group_pids(self.process.pid):
            with contextlib.suppress(OSError, IndexError, ValueError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return total * os.sysconf("SC_PAGE_SIZE")


def _leave_cleanly_on_termination() -> None:
    """Turn SIGTERM and SIGHUP into an exit that unwinds the stack: by default they would leave the servers behind."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda number, _: sys.exit(128 + number))


def _signal_group(group: int, number: signal.Signals) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _group_pids(group: int) -> list[int]:
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) == group:
                    pids.append(int(entry.name))
    return pids


def _wait_for_group(group: int, timeout: float = 10.0) -> None:
    """Wait until the killed workers have given back their memory and ports (zombies count as gone)."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        alive = []
        for pid in _group_pids(group):
            with contextlib.suppress(OSError, IndexError):
                if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                    alive.append(pid)
        if not alive:
            return
        time.sleep(0.1)
