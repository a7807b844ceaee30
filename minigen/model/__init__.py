"""From stored tensors to the logits of the next token."""
