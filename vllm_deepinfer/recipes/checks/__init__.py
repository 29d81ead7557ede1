"""What can be wrong with a recipe, one file per subject: each yields sentences and never raises."""
