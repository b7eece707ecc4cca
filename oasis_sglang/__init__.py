"""OasisKV for SGLang: host-resident KV cache with sparse decode.

Importing the package loads nothing else, so that SGLang's entry-point scan and the command line stay fast.
"""

__version__ = "0.1.0"
