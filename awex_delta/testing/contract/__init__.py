"""What an `EngineView` or a `TrainerView` of your own has to keep to, as checks that you can run."""
