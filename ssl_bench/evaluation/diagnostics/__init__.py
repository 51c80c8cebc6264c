"""Label-free figures of an embedding: pure functions on tensors."""
