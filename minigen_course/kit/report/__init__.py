"""What an instructor and the students get of a grading: marks, feedback, answers in words."""
