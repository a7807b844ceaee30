"""What may be assigned of chapter 53: cases by seed for its exercises, and questions."""
