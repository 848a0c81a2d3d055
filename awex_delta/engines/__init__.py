"""Inference engines, each seen as an `EngineView`. Import the module of the engine you use."""
