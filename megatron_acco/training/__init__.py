"""The Megatron half: arguments, model, data, the training loop. Knows the optimizer half by its public API only."""
