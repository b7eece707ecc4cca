"""Training of an EAGLE-3 draft head for a Llama-family target (arXiv 2503.01840), by self-distillation."""
