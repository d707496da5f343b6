"""Coverage-guided fuzzing of all code that reads bytes from other parties."""
