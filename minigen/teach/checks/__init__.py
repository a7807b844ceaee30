"""The checks of each chapter that has exercises; the package passes them, and so must you."""
