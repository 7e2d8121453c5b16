"""Generation: the explicit phases and the greedy token-by-token loop."""
