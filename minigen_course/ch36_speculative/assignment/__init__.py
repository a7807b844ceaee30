"""What may be assigned of chapter 36: cases by seed for its exercises, and questions."""
