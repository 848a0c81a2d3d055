"""Configuration files of a whole run, and what such a run will need."""
