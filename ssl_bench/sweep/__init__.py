"""Study to trials to stages: planning, running, resuming."""
