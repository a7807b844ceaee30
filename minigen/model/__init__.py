"""The model: from a checkpoint's tensors to the logits of the next token."""
