"""What each subcommand of cli.py does. Heavy imports stay inside, so that --help is quick."""
