"""Examples of plug-ins: each folder is used from the command line without a change to the package."""
