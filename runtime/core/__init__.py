"""The nouns that an engine computes with: requests, batches, K/V cache, states, sampling, grammars, verification."""
