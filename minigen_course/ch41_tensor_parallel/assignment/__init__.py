"""What may be assigned of chapter 41: cases by seed for its exercises, and questions."""
