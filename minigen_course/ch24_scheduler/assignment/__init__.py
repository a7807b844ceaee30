"""What may be assigned of chapter 24: cases by seed for its exercises, and questions."""
