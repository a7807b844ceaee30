"""From logits to the next token: parameters, filters, draws, log-probabilities."""
