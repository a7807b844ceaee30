"""One model on several devices: who holds what, and the messages between them."""
