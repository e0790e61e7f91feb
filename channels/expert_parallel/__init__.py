"""Expert parallelism: MoE dispatch and combine."""
