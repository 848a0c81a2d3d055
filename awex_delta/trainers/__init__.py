"""Training frameworks, each behind `types.TrainerView`. Import the one you use."""
