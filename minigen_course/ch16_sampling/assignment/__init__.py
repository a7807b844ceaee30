"""What may be assigned of chapter 16: cases by seed for its exercises, and questions."""
