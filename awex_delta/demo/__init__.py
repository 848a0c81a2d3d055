"""The demo: small trainings on this machine, compared bit by bit at every version."""
