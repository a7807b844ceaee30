"""What may be assigned of chapter 51: cases by seed for its exercises, and questions."""
