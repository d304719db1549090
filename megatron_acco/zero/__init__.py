"""The optimizer half: ACCO rounds on DeepSpeed ZeRO stage 1. Never imports megatron."""
