"""Pipeline parallelism: micro-batches pass through the stages of a model on several ranks."""
