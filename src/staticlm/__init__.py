"""Hugging Face causal language models as fixed-shape ExecuTorch programs."""
