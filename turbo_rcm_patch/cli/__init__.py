"""The command line: options, commands, progress and exit codes. Nothing imports it but itself."""
