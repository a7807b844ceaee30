"""What may be assigned of chapter 23: cases by seed for its exercises, and questions."""
