"""The `awex-delta` command. Each subcommand is one module here with a `typer.Typer` named `app`."""
