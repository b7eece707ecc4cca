"""The CPU platform plugin: lets SGLang start where there is neither an accelerator nor a CPU kernel wheel.

cpu.py               the entry point; decides whether this platform applies, imports nothing heavy
srt_platform.py      the `SRTPlatform` that SGLang instantiates
defaults.py          server flags and thread settings the platform fills in when the user gave none
host.py              cores and memory this process may use (affinity, cgroup v1 and v2)
packed_linear.py     linear layers over weights packed once for oneDNN
native_ops.py        RMSNorm and rope in fewer torch calls
attention_native.py  `torch_native` decode attention with less work per layer
symbols.py           what all this rests on in SGLang
"""
