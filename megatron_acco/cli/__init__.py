"""The console command `megatron-acco`."""
