"""The CPU platform plugin: lets SGLang start where there is neither an accelerator nor a CPU kernel wheel.

cpu.py            the entry point; decides whether this platform applies, imports nothing heavy
srt_platform.py   the `SRTPlatform` that SGLang instantiates
defaults.py       server flags the platform fills in when the user gave none
host.py           cores and memory this process may use (affinity, cgroup v1 and v2)
"""
