"""Decoder-only transformers and their checkpoints."""
