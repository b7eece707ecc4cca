"""One file per question; run each with `python -m benchmarks.<name> --help`."""
