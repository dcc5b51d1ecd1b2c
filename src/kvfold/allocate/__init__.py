"""Budget mathematics on plain tensors: who gets how many bits. Knows nothing of models or stores."""
