"""Exchanges between GPUs by NCCL."""
