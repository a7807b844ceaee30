"""Chapter 42: Stages, rings and replicas."""
