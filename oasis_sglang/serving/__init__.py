"""Start SGLang servers and talk to them: what the demo, the benchmarks and the server tests share.

    server.py     one server as a context manager: own process group, own log, always stopped
    client.py     HTTP requests, streamed answers with the time of every token
    documents.py  prompts of an exact length, made of English text that ships with Python
    report.py     tables for people and JSON for programs

Nothing here imports torch or SGLang: the servers are separate processes.
"""

from oasis_sglang.serving.client import Answer, Client, RequestFailed, ask_all, decode_rate, greedy
from oasis_sglang.serving.documents import Documents
from oasis_sglang.serving.report import Report
from oasis_sglang.serving.server import Server, ServerFailed, oasis_flags

__all__ = [
    "Answer",
    "Client",
    "Documents",
    "Report",
    "RequestFailed",
    "Server",
    "ServerFailed",
    "ask_all",
    "decode_rate",
    "greedy",
    "oasis_flags",
]
