"""Write what the instructor's guide takes from the exercises: `python -m tools.instructors`."""
