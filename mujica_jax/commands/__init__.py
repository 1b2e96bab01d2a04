"""The programs: parse a command line, call the package, report. One module for each program."""
