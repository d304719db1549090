"""What run folders hold, compared: `megatron-acco report`, and the figures of `megatron-acco plot`."""
