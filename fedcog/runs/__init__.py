"""One experiment carried out and recorded: configuration, setup, runner, run directory."""
