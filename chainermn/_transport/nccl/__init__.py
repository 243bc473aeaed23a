"""NCCL-based transports."""
