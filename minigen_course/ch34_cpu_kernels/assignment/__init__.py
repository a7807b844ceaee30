"""What may be assigned of chapter 34: cases by seed for its exercises, and questions."""
