"""What may be assigned of chapter 00: cases by seed for its exercises, and questions."""
